"""Whether the kernels for GPUs are wanted and can run here, said without importing a framework."""

import os
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

VARIABLE = "GRADCLIP_GPU_KERNELS"
_OLDEST = (3, 4)  # older releases of Triton pass numbers as float32
_NAMES = ("triton", "pytorch-triton", "pytorch-triton-rocm")  # of what installs it


def wanted(default: bool = True) -> bool:
    """Say whether the kernels are switched on, or what to assume if nobody says."""
    asked = os.environ.get(VARIABLE, "1" if default else "0")
    return asked.strip().lower() not in ("", "0", "false", "no", "off")


@lru_cache(maxsize=1)
def lacking() -> str:
    """Return what the kernels lack; empty if they can run."""
    found = _release()
    if found is None:
        return "Triton is not installed"
    oldest = ".".join(map(str, _OLDEST))
    too_old = tuple(map(int, found.split(".")[:2])) < _OLDEST
    return f"Triton {found} is too old, {oldest} is needed" if too_old else ""


def status_text() -> str:
    """Return one line that says whether PyTorch's gradients on a GPU are clipped by the kernels."""
    if not wanted():
        return f"off by {VARIABLE}={os.environ[VARIABLE]}"
    return f"off: {lacking()}" if lacking() else f"on, by Triton {_release()}"


def _release() -> str | None:
    for name in _NAMES:
        try:
            return version(name)
        except PackageNotFoundError:
            pass
    return None
