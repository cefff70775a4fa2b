"""The kernels for arrays in host memory."""

import os
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

ADDITIONS = 87  # a term takes part in: kAdditions in a chunk, the chunks added up with a correction

kernels: ModuleType | None
try:
    from gradclip.native import _kernels as kernels
except ImportError:
    kernels = None


class Described(NamedTuple):
    """Arrays as the kernels know them, and the indices of those left out: not dense, not aligned, or elsewhere."""

    kernels: Any
    left_out: Sequence[int]


def describe_buffers(arrays: Sequence[Any]) -> Described:
    """Describe NumPy arrays, unsigned 16-bit ones as bfloat16."""
    if kernels is None:
        return Described(None, range(len(arrays)))
    return Described(*kernels.describe_buffers(list(arrays)))


def describe_tensors(tensors: Sequence[Any], exchange_api: Any) -> Described:
    """Describe tensors by the DLPack exchange table of their type."""
    if kernels is None:
        return Described(None, range(len(tensors)))
    return Described(*kernels.describe_tensors(list(tensors), exchange_api))


@cache
def default_threads() -> int:
    """Return OMP_NUM_THREADS where it is set, else the number of processors that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
