"""The compiled kernels, where there are any: nothing else imports them.

`kernels` is the compiled module, or None: gradclip then computes the same results in Python. Which of the two it is
gets decided once, at the first import. The environment variable GRADCLIP_NATIVE has a say in it: "0" switches the
kernels off, "baseline" or "avx2" picks one variant of them, and unset or empty it leaves the choice to gradclip, which
takes the best that the processor runs. A value that cannot be followed switches the kernels off, with a warning.
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

# A term of a sum takes part in 85 additions in its chunk, and the sums of the chunks are added with a correction.
ADDITIONS = 87

# Squares of half types are exact in float32, where four at a time are added: three roundings, of 2**-24 each.
HALF_SQUARES_ERROR = 2.0**-22

_MOST_THREADS = 9999  # more than any machine has; the kernels start no more than the work is worth

_BUILD = (
    "To build them, install a C++ compiler (GCC or Clang) and then gradclip again, by pip install --force-reinstall "
    "--no-deps --no-cache-dir; GRADCLIP_REQUIRE_NATIVE=1 in its environment shows the compiler's message."
)


@dataclass(frozen=True)
class NativeStatus:
    """Whether the compiled kernels are in use.

    Attributes:
        available: Whether they are.
        variant: The set of instructions in use, "avx2" or "baseline"; None if the kernels are not in use.
        variants: All that this processor can run, the best last; empty if the kernels were not loaded.
        reason: Why the kernels are not in use and what to do about it; None if they are.
    """

    available: bool
    variant: str | None
    variants: tuple[str, ...]
    reason: str | None

    def __str__(self) -> str:
        return self.variant if self.variant is not None else f"not available: {self.reason}"


def native_status() -> NativeStatus:
    """Say whether the compiled kernels are in use, which variant of them, and if none why not.

    Returns:
        The same answer for as long as the process runs.

    Example:
        >>> status = native_status()
        >>> status.available == (status.variant is not None) == (status.reason is None)
        True
    """
    return _status


class Described(NamedTuple):
    """Arrays as the kernels know them, and the indices of those left out: not dense, not aligned, or elsewhere."""

    kernels: Any
    left_out: Sequence[int]


def describe_buffers(arrays: Sequence[Any]) -> Described:
    """Describe NumPy arrays, unsigned 16-bit ones as bfloat16."""
    if kernels is None:
        return Described(None, range(len(arrays)))
    return Described(*kernels.describe_buffers(list(arrays)))


@cache
def default_threads() -> int:
    """Return OMP_NUM_THREADS where it is set, else the number of processors that this process may use."""
    # OpenMP takes a list here, one number for each level of nesting.
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked.isascii() and asked.isdecimal() and asked.strip("0"):
        # Python refuses to read thousands of digits, and the kernels take an int of C++.
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
    _status = _unavailable("GRADCLIP_NATIVE=0 switches the kernels off. Unset it to use them.")
# An ImportError would not tell what was not built from what does not load.
elif find_spec("gradclip.native._kernels") is None:
    _status = _unavailable(f"The kernels were not built when gradclip was installed. {_BUILD}")
else:
    try:
        from gradclip.native import _kernels as kernels
    except ImportError as error:
        _status = _unavailable(f"The kernels do not load: {str(error).rstrip('.')}. {_BUILD}")
    else:
        _status = _choose(_wanted, tuple(kernels.variants()))

if _status.variant is not None:
    kernels.use_variant(_status.variant)
else:
    # Ignored, so that mypy knows it by its stub; a module has no type that None could be added to.
    kernels = None  # type: ignore[assignment]
