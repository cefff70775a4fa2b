"""The compiled kernels, where there are any: nothing else imports them.

`kernels` is the compiled module, or None: gradclip then computes the same results in Python. Which of the two it is
gets decided once, at the first import. The environment variable GRADCLIP_NATIVE has a say in it: "0" switches the
kernels off, "baseline" or "avx2" picks one variant of them, and unset or empty it leaves the choice to gradclip, which
takes the best that the processor runs. A value that cannot be followed switches the kernels off, with a warning.
"""

import os
import warnings
from dataclasses import dataclass
from importlib.util import find_spec

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
elif find_spec("gradclip.native._kernels") is None:
    _status = _unavailable(f"The kernels were not built when gradclip was installed. {_BUILD}")
else:
    try:
        from gradclip.native import _kernels as kernels
    except ImportError as error:
        _status = _unavailable(f"The kernels do not load: {str(error).rstrip('.')}. {_BUILD}")
    else:
        _status = _choose(_wanted, tuple(kernels.variants()))

if not _status.available:
    # Ignored, so that mypy knows it by its stub; a module has no type that None could be added to.
    kernels = None  # type: ignore[assignment]
