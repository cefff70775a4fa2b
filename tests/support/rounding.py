"""Threads whose results are rounded in one direction."""

import ctypes
import platform
from contextlib import contextmanager

_C = ctypes.CDLL(None)
_MODES = (0x400000, 0x800000, 0xC00000) if platform.machine() in ("aarch64", "arm64") else (0x800, 0x400, 0xC00)
DIRECTIONS = dict(zip(("up", "down", "to zero"), _MODES, strict=True))


def direction():
    """Return the direction of this thread as the C library names it; 0 if it rounds to nearest."""
    return _C.fegetround()


@contextmanager
def rounding(name):
    """Make this thread round in a direction, as some libraries leave it, and to nearest again at the end."""
    assert direction() == 0
    assert _C.fesetround(DIRECTIONS[name]) == 0
    try:
        yield
        assert direction() == DIRECTIONS[name]
    finally:
        _C.fesetround(0)
