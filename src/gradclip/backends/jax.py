"""JAX: concrete arrays on the CPU as host memory; tracers there with the kernels; others through XLA's operations."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradclip import native
from gradclip.backends.arrays import Arrays
from gradclip.backends.formats import BFLOAT16
from gradclip.backends.host import HostArray, HostArrays, OnlyFinite
from gradclip.backends.jax_axes import Axes
from gradclip.backends.jax_ffi import usable
from gradclip.backends.jax_kernels import JaxKernels
from gradclip.backends.jax_traced import Jax, check_64_bit_mode, prepared, split_over
from gradclip.backends.numpy import Host, known_to_buffers

_ALIGNMENT = 64  # bytes


class JaxHost(Host):
    """Concrete arrays on one CPU device, viewed as NumPy arrays."""

    def over(self, axis_name: Any) -> Jax:
        return split_over(Axes.named(axis_name))

    def prepare(self, leaf: Any) -> jax.Array:
        return prepared(leaf)

    def prepare_in_place(self, leaf: Any) -> jax.Array:
        return jnp.asarray(leaf)

    def writable(self, leaf: Any) -> bool:
        return False

    def enter(self, prepared: Sequence[jax.Array]) -> HostArrays:
        views = list(map(np.asarray, prepared))
        known = native.describe_buffers(list(map(known_to_buffers, views)))
        return HostArrays(list(zip(views, prepared, strict=True)), _with_origin, known)

    def empty_like(self, x: HostArray) -> HostArray:
        """Return an array aligned so that JAX takes its memory over instead of copying it."""
        memory = np.empty(x.data.nbytes + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        aligned = memory[start : start + x.data.nbytes].view(x.data.dtype)
        return HostArray(aligned.reshape(x.shape), x.dtype)

    def shrink(self, arrays: Arrays, coefficient: Any) -> list[HostArray]:
        kept = coefficient.keep and not isinstance(arrays, OnlyFinite)
        return list(arrays) if kept else super().shrink(arrays, coefficient)

    def leave(self, array: HostArray, leaf: Any) -> jax.Array:
        if array.origin is not None:
            return array.origin
        data = array.data
        if array.dtype == BFLOAT16.name:
            data = data.view(jnp.bfloat16)
        return jax.device_put(data, getattr(leaf, "sharding", None))

    def check_sum_dtype(self, dtype: str | None) -> None:
        check_64_bit_mode(dtype)

    def leave_sum(self, wide: np.ndarray, x: HostArray, dtype: str | None) -> jax.Array:
        return jnp.asarray(super().leave_sum(wide, x, dtype))

    def leave_count(self, flags: np.ndarray) -> jax.Array:
        return jnp.asarray(super().leave_count(flags), jnp.int32)

    def leave_scalar(self, value: Any, dtype: str, leaves: Sequence[Any]) -> jax.Array:
        return jnp.asarray(super().leave_scalar(value, dtype, leaves))


def _with_origin(pair: tuple[np.ndarray, jax.Array]) -> HostArray:
    view, origin = pair
    return replace(HostArray.of(view), origin=origin)


def in_host_memory(array: Any) -> bool:
    """Say whether the values of an array lie in host memory and may be looked at."""
    if isinstance(array, jax.core.Tracer):
        return False
    devices = array.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def backend(leaves: Sequence[Any], scalars: Sequence[Any]) -> JaxHost | Jax:
    """Return the backend for these arrays: the host's where all of them lie in its memory."""
    arrays = [x for x in (*leaves, *scalars) if isinstance(x, jax.Array)]
    if all(map(in_host_memory, arrays)):
        return HOST
    traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
    return JaxKernels(visible=False) if traced and usable(leaves) else Jax(visible=not traced)


HOST = JaxHost()
