"""The kernels as XLA's compiled code calls them: one call reads all arrays of a norm where they lie.

A call under `vmap` is one call still: the arrays get a leading axis, and each row of it a norm.
"""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradclip import native


def usable(leaves: Sequence[Any]) -> bool:
    """Say whether traced calls can use the kernels.

    That takes one CPU device, for XLA would gather arrays that lie on several, and sizes that are known: where they are
    symbols, a program is being exported, which cannot hold such calls.
    """
    return (
        jax.default_backend() == "cpu"
        and jax.device_count() == 1
        and all(isinstance(length, int) for leaf in leaves for length in np.shape(leaf))
        and registered()
    )


@cache
def registered() -> bool:
    """Make the kernels known to XLA; say whether they are."""
    if native.kernels is None:
        return False
    try:
        jax.ffi.register_ffi_target("gradclip_power_sums", native.kernels.xla_power_sums(), platform="cpu")
        jax.ffi.register_ffi_target("gradclip_add_examples", native.kernels.xla_add_examples(), platform="cpu")
        jax.ffi.register_ffi_target("gradclip_extremes", native.kernels.xla_extremes(), platform="cpu")
        jax.ffi.register_ffi_target("gradclip_entries", native.kernels.xla_entries(), platform="cpu")
    except (AttributeError, RuntimeError):  # a JAX that has no such interface, or another version of it
        return False
    return True


def power_sums(
    arrays: Sequence[jax.Array], p: float, enough: float, rows: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return the sum of (|x| / divisor)**p over all arrays, and the divisor, for each of `rows`, the leading axes.

    The divisor is 1 if the sum is then finite and above `enough`, else the largest magnitude.
    """
    return _call("gradclip_power_sums", arrays, rows, p=np.float64(p), enough=np.float64(enough))


def extremes(arrays: Sequence[jax.Array], rows: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the largest magnitude, NaN where one is NaN, and the smallest, NaN where one is not finite."""
    return _call("gradclip_extremes", arrays, rows)


def add_examples(
    arrays: Sequence[jax.Array], weighing: jax.Array, included: jax.Array, columns: int
) -> tuple[jax.Array, jax.Array]:
    """Return each example's sum of squares, and the `columns` sums of all examples, each times its weight."""
    wide = jax.ShapeDtypeStruct(included.shape, jnp.float64), jax.ShapeDtypeStruct((columns,), jnp.float64)
    # One call after the other under `vmap`: the kernel knows no second batch axis.
    call = jax.ffi.ffi_call("gradclip_add_examples", wide, vmap_method="sequential")
    return call(weighing, included, *arrays, threads=np.int64(native.default_threads()))


def entries(vectors: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Return each vector's entries as scalars. XLA compiles what takes them as one program for all of them."""
    scalars = [jax.ShapeDtypeStruct((), vector.dtype) for vector in vectors for _ in range(vector.shape[0])]
    call = jax.ffi.ffi_call("gradclip_entries", scalars, vmap_method="broadcast_all")
    found = iter(call(*vectors))
    return [list(itertools.islice(found, vector.shape[0])) for vector in vectors]


def _call(
    target: str, arrays: Sequence[jax.Array], rows: tuple[int, ...], **attributes: Any
) -> tuple[jax.Array, jax.Array]:
    wide = jax.ShapeDtypeStruct(rows, jnp.float64)
    # `vmap` gives arrays that it does not map an axis of length 1, so rows of all arrays agree or broadcast.
    call = jax.ffi.ffi_call(target, (wide, wide), vmap_method="expand_dims")
    return call(*arrays, threads=np.int64(native.default_threads()), **attributes)
