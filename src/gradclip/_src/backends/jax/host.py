"""The backend for concrete JAX arrays on the CPU, and the choice of the backend for other JAX arrays."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradclip._src import native
from gradclip._src.backends.host.arrays import HostArray, HostArrays, aligned_empty
from gradclip._src.backends.host.backend import HOST as NUMPY_HOST
from gradclip._src.backends.host.backend import Host, known_to_buffers
from gradclip._src.backends.jax.ffi import usable
from gradclip._src.backends.jax.kernels import JaxKernels
from gradclip._src.backends.jax.placement import NamedAxes, of_numpy, placed_first, put, typed_like
from gradclip._src.backends.jax.traced import JaxTraced, check_64_bit_mode, over_named, prepared
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import BFLOAT16
from gradclip._src.core.protocols import HostBackend


class JaxHost(Host):
    """Concrete JAX arrays, each on one CPU device, viewed as NumPy arrays. NumPy arrays stay NumPy arrays."""

    def mesh(self, axis_name: Hashable) -> tuple[JaxTraced, NamedAxes]:
        return over_named(axis_name)

    def known(self, leaves: Sequence[Any]) -> None:
        return None  # JAX creates the results

    def prepare(self, leaf: object) -> Any:
        return super().prepare(leaf) if of_numpy(leaf) else prepared(leaf)

    def prepare_in_place(self, leaf: object) -> Any:
        return np.asarray(leaf) if of_numpy(leaf) else jnp.asarray(leaf)

    def writable(self, leaves: Sequence[Any]) -> bool:
        return all(map(of_numpy, leaves)) and super().writable(leaves)

    def enter(self, prepared: Sequence[Any]) -> HostArrays:
        # Views, not copies: JAX exposes the memory of CPU arrays read-only.
        views = list(map(np.asarray, prepared))
        known = native.describe_buffers(list(map(known_to_buffers, views)))
        return HostArrays(list(zip(views, prepared, strict=True)), _with_origin, known)

    def empty_like(self, x: HostArray) -> HostArray:
        """Return an array with the alignment that lets JAX use its memory without a copy."""
        return HostArray(aligned_empty(x.shape, x.data.dtype), x.dtype)

    def leave(self, array: Any, leaf: object) -> Any:
        return self.leave_all([array], [leaf])[0]

    def leave_all(self, arrays: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        new = [(x, leaf) for x, leaf in zip(arrays, leaves, strict=True) if not of_numpy(leaf)]
        made = iter(put([_as_jax_knows(x) for x, _ in new], [leaf for _, leaf in new]))

        def result(x: HostArray, leaf: object) -> Any:
            return super(JaxHost, self).leave(x, leaf) if of_numpy(leaf) else typed_like(next(made), leaf)

        return list(map(result, arrays, leaves))

    def copies(self, arrays: Arrays) -> list[HostArray]:
        # Their memory is from `empty_like`, so JAX uses it without a second copy.
        return self._filled_copies(arrays)

    def check_sum_dtype(self, dtype: str | None) -> None:
        check_64_bit_mode(dtype)

    def leave_sums(self, wides: Sequence[Any], arrays: Sequence[Any], dtype: str | None) -> list[Any]:
        sums = super().leave_sums(wides, arrays, dtype)
        ours = [i for i, x in enumerate(arrays) if x.origin is not None]
        made = put([sums[i] for i in ours], [arrays[i].origin for i in ours])
        for i, array in zip(ours, made, strict=True):
            sums[i] = array
        return sums

    def leave_count(self, flags: Any, leaves: Sequence[Any]) -> jax.Array:
        # JAX counts in int32 unless 64-bit mode is on. Use int32 in both modes.
        return put([super().leave_count(flags, leaves).astype(np.int32)], [placed_first(leaves)])[0]

    def leave_scalar(self, value: Any, dtype: str, leaves: Sequence[Any]) -> jax.Array:
        return put([super().leave_scalar(value, dtype, leaves)], [placed_first(leaves)])[0]

    def leave_each(self, values: Any, dtype: str, leaves: Sequence[Any]) -> list[jax.Array]:
        near = (leaf if isinstance(leaf, list) else [leaf] for leaf in leaves)
        return put([np.asarray(x, dtype) for x in values], list(map(placed_first, near)))


def _with_origin(pair: tuple[np.ndarray, jax.Array]) -> HostArray:
    view, origin = pair
    return HostArray.of(view) if of_numpy(origin) else replace(HostArray.of(view), origin=origin)


def _as_jax_knows(array: HostArray) -> np.ndarray:
    return array.data.view(jnp.bfloat16) if array.dtype == BFLOAT16.name else array.data


def in_host_memory(array: jax.Array) -> bool:
    """Say whether an array is concrete and its values are in host memory."""
    if isinstance(array, jax.core.Tracer):
        return False
    devices = array.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def backend(leaves: Sequence[Any], scalars: Sequence[Any]) -> Host | JaxTraced:
    """Return the backend for these arrays.

    Arrays in host memory get the host backend, traced arrays the kernels if `usable`, all others XLA's operations.
    """
    arrays = [x for x in (*leaves, *scalars) if isinstance(x, jax.Array)]
    if all(map(in_host_memory, arrays)):
        # NumPy arrays stay NumPy arrays, even with a threshold that is a JAX array.
        return NUMPY_HOST if leaves and all(map(of_numpy, leaves)) else HOST
    traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
    return JaxKernels(visible=False) if traced and usable(leaves) else JaxTraced(visible=not traced)


HOST = JaxHost()
_checked: type[HostBackend] = JaxHost
