"""Calls of the kernels from XLA's compiled code. One call reads all arrays of a norm, without copies.

Under `vmap` there is still one call: the arrays get a leading axis, and each of its rows has a norm.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradclip import native
from gradclip.backends.jax import exported
from gradclip.backends.jax.lowered import Kernel

# The versions of XLA's interface that are known to accept the kernels. They are written for version 0.2.
_ACCEPTING = ("0.2", "0.3")


def usable(leaves: Sequence[Any]) -> bool:
    """Say whether traced calls can use the kernels.

    They can if there is one CPU device and all sizes are known. With several devices, XLA would gather the arrays.
    Symbolic sizes mean that a program is being exported, and the calls need sizes.
    """
    return (
        jax.default_backend() == "cpu"
        and jax.device_count() == 1
        and all(isinstance(length, int) for leaf in leaves for length in np.shape(leaf))
        and registered()
    )


def register_at_import() -> None:
    """Register the kernels with XLA before it starts, if it is known to accept them.

    Until XLA starts, it keeps a refusal to itself, and then does not start at all. Later, a refusal is an exception.
    """
    if _interface() in _ACCEPTING:
        registered()


def _interface() -> str:
    """Return the version of XLA's interface from its header; an empty string if there is none."""
    try:
        header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text(encoding="utf-8")
    except (AttributeError, OSError):  # jax.ffi may not exist
        return ""
    return ".".join(re.findall(r"^#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header, re.MULTILINE))


@cache
def registered() -> bool:
    """Register the kernels with XLA, which must have started, unless it is known to accept them.

    Return whether that worked.
    """
    if native.kernels is None:
        return False
    try:
        jax.ffi.register_ffi_target("gradclip_power_sums", native.kernels.xla_power_sums(), platform="cpu")
        jax.ffi.register_ffi_target("gradclip_add_examples", native.kernels.xla_add_examples(), platform="cpu")
        jax.ffi.register_ffi_target("gradclip_extremes", native.kernels.xla_extremes(), platform="cpu")
        jax.ffi.register_ffi_target("gradclip_entries", native.kernels.xla_entries(), platform="cpu")
    except (AttributeError, RuntimeError):  # this JAX has no such interface, or a different version
        return False
    return True


def power_sums(
    arrays: Sequence[jax.Array], p: float, enough: float, rows: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return the sum of (|x| / divisor)**p over all arrays, and the divisor, for each row of the leading axes `rows`.

    The divisor is 1 if the sum is then finite and above `enough`. Otherwise it is the largest magnitude.
    """
    attributes = ("p", np.float64(p)), ("enough", np.float64(enough))
    total, divisor = _reduction("gradclip_power_sums", rows, exported.power_sums, *attributes)(arrays)
    return total, divisor


def extremes(arrays: Sequence[jax.Array], rows: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the largest magnitude (NaN if one is NaN) and the smallest (NaN if one is non-finite)."""
    largest, smallest = _reduction("gradclip_extremes", rows, exported.extremes)(arrays)
    return largest, smallest


# Sequential mapping is a loop. Outside traced code, only a jitted function keeps its program for the next call.
@partial(jax.jit, static_argnames="columns", inline=True)
def add_examples(
    arrays: Sequence[jax.Array], weighing: jax.Array, included: jax.Array, columns: int
) -> tuple[jax.Array, jax.Array]:
    """Return each example's sum of squares, and the `columns` weighted sums over the examples."""
    wide = jax.ShapeDtypeStruct(included.shape, jnp.float64), jax.ShapeDtypeStruct((columns,), jnp.float64)
    # In a loop under `vmap`: the kernel does not support a second batch axis.
    kernel = Kernel("gradclip_add_examples", wide, exported.add_examples, "loop", (_threads(),))
    squares, totals = kernel([weighing, included, *arrays])
    return squares, totals


def entries(vectors: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Split vectors into scalars. XLA then compiles the code that uses them once for all of them."""
    scalars = tuple(jax.ShapeDtypeStruct((), vector.dtype) for vector in vectors for _ in range(vector.shape[0]))
    found = iter(Kernel("gradclip_entries", scalars, exported.entries, "broadcast")(vectors))
    return [list(itertools.islice(found, vector.shape[0])) for vector in vectors]


def _reduction(
    target: str, rows: tuple[int, ...], portable: Callable[..., Any], *attributes: tuple[str, Any]
) -> Kernel:
    wide = jax.ShapeDtypeStruct(rows, jnp.float64)
    # The rows of all arrays agree or broadcast.
    return Kernel(target, (wide, wide), portable, "expand", (_threads(), *attributes))


def _threads() -> tuple[str, Any]:
    return "threads", np.int64(native.default_threads())
