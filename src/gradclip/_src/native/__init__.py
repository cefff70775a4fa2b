"""Load the compiled kernels, if they are installed. No other module imports them.

`kernels` is the compiled module, or None. Without it gradclip computes the same results in Python. The choice is made
once, at the first import. The environment variable GRADCLIP_NATIVE controls it: "0" turns the kernels off, and
"baseline", "avx2" or "avx512" picks one variant. If it is unset or empty, gradclip takes the best variant that the
processor can run. An invalid value, or a variant that the processor cannot run, turns the kernels off, with a warning.

What the kernels do with bits is right for all numbers: proofs/bits.py.
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple
from zipimport import zipimporter

from gradclip._src.public import public

# Each term of a sum goes through 85 additions in its chunk. The sums of the chunks are added with error compensation.
ADDITIONS = 87

# Squares of half types are exact in float32. Four of them are added in float32: three roundings of 2**-24 each.
HALF_SQUARES_ERROR = 2.0**-22

_MOST_THREADS = 9999  # more than any machine has; the kernels start only as many threads as the work needs

_BUILD = (
    "To build them, install a C++ compiler (GCC or Clang), then run pip install --force-reinstall --no-deps "
    "--no-cache-dir . in a clone of gradclip. Set GRADCLIP_REQUIRE_NATIVE=1 for that command to see the compiler's "
    "message."
)


@public
@dataclass(frozen=True)
class NativeStatus:
    """Whether gradclip uses its compiled kernels, and which variant. It is true if `available` is.

    Attributes:
        available: whether the kernels are in use.
        variant: the instruction set in use, "baseline", "avx2" or "avx512". None if the kernels are not in use.
        variants: all variants that this processor can run, the best one last. Empty if the kernels are not loaded.
        reason: why the kernels are not in use, and what to do about it. None if they are in use.
    """

    available: bool
    variant: str | None
    variants: tuple[str, ...]
    reason: str | None

    def __bool__(self) -> bool:
        return self.available

    def __str__(self) -> str:
        return self.variant if self.variant is not None else f"not available: {self.reason}"


@public
def native_status() -> NativeStatus:
    """Return whether the compiled kernels are in use: which variant, or why not.

    Returns:
        A `NativeStatus`. It does not change while the process runs.

    >>> status = native_status()
    >>> status.available == (status.variant is not None) == (status.reason is None)
    True
    """
    return _status


class Described(NamedTuple):
    """Arrays described to the kernels, and the indices of those left out: not dense, not aligned, or not on the CPU."""

    kernels: Any
    left_out: Sequence[int]


def describe_buffers(arrays: Sequence[Any]) -> Described:
    """Describe NumPy arrays to the kernels. Unsigned 16-bit integers are taken as bfloat16."""
    if kernels is None:
        return Described(None, range(len(arrays)))
    return Described(*kernels.describe_buffers(list(arrays)))


@cache
def default_threads() -> int:
    """Return OMP_NUM_THREADS if it is set, else the number of processors that this process may use."""
    # OpenMP also accepts a list: one number for each nesting level.
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked.isascii() and asked.isdecimal() and asked.strip("0"):
        # Python refuses to parse thousands of digits, and the kernels take a C++ int.
        return int(asked) if len(asked) < 5 else _MOST_THREADS
    # A container or a batch system may allow fewer processors than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _choose(wanted: str, variants: tuple[str, ...]) -> NativeStatus:
    if not wanted or wanted in variants:
        return NativeStatus(True, wanted or variants[-1], variants, None)
    reason = (
        f"GRADCLIP_NATIVE must be one of {', '.join(variants)} on this processor, or 0 for no kernels, got {wanted!r}. "
        "Unset it to let gradclip choose."
    )
    warnings.warn(f"gradclip runs without its compiled kernels. {reason}", RuntimeWarning, stacklevel=2)
    return NativeStatus(False, None, variants, reason)


def _unavailable(reason: str) -> NativeStatus:
    return NativeStatus(False, None, (), reason)


_wanted = os.environ.get("GRADCLIP_NATIVE", "")
if _wanted == "0":
    _status = _unavailable("GRADCLIP_NATIVE=0 turns the kernels off. Unset it to use them.")
elif isinstance(__spec__.loader, zipimporter):
    _status = _unavailable(
        f"gradclip was imported from a zip file, {__spec__.loader.archive}. Python cannot load the kernels from there: "
        "they are a shared library. To use them, unpack the file, or install gradclip with pip."
    )
# An ImportError alone would not distinguish kernels that were not built from kernels that do not load.
elif find_spec("gradclip._src.native._kernels") is None:
    _status = _unavailable(f"The kernels were not built when gradclip was installed. {_BUILD}")
else:
    try:
        from gradclip._src.native import _kernels as kernels
    except ImportError as error:
        _status = _unavailable(f"The kernels failed to load: {str(error).rstrip('.')}. {_BUILD}")
    else:
        _status = _choose(_wanted, tuple(kernels.variants()))

if _status.variant is not None:
    kernels.use_variant(_status.variant)
else:
    # Ignored so that mypy still types the module by its stub: a module's type cannot be extended with None.
    kernels = None  # type: ignore[assignment]
