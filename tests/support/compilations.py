"""Count what JAX compiles, and how much memory a process keeps."""

import gc
import os
from pathlib import Path

import jax
import pytest

_compiled = []


def _listen(event, seconds, **_):
    if event.endswith("backend_compile_duration"):
        _compiled.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)


def compiled_in(call):
    """Return how many programs a call compiles."""
    before = len(_compiled)
    jax.block_until_ready(call())
    return len(_compiled) - before


def kept_by(call, times):
    """Return how many programs further calls compile, and how many bytes the process then holds in addition."""
    for _ in range(3):  # the second call may compile what the first did not need
        call()
    gc.collect()
    held = resident()
    compiled = sum(compiled_in(call) for _ in range(times))
    gc.collect()
    return compiled, resident() - held


def resident():
    """Return the bytes of this process in memory. Skip the test where the system does not tell."""
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("needs /proc")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
