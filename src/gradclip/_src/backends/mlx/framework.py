"""The MLX entry for the registry, and the backend for arrays that the CPU computes, viewed as NumPy arrays.

An array that is asked for is computed first: MLX is lazy. Arrays that a transformation traces have no values here, even
if `mx.grad` would give them: what is read has no derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from gradclip._src import native
from gradclip._src.backends.framework import Framework
from gradclip._src.backends.host.arrays import HostArray, HostArrays
from gradclip._src.backends.host.backend import ImmutableHost, dtype_named
from gradclip._src.backends.mlx import namespace
from gradclip._src.backends.mlx.lazy import Lazy, array_of, on_gpu
from gradclip._src.core.arrays import checked_dtype
from gradclip._src.core.formats import BFLOAT16, FLOAT32, FLOAT64, Format, bare_name, dtype_name
from gradclip._src.core.protocols import Backend, HostBackend


class MlxHost(ImmutableHost):
    """Arrays whose values are in the memory of the CPU."""

    def known(self, leaves: Sequence[Any]) -> None:
        return None  # MLX creates the results

    def prepare(self, leaf: object) -> mx.array:
        return checked_dtype(array_of(leaf))

    def prepare_in_place(self, leaf: object) -> mx.array:
        return array_of(leaf)

    def enter(self, prepared: Sequence[mx.array]) -> HostArrays:
        views = _views(prepared)
        return HostArrays(views, lambda x: x, native.describe_buffers([x.data for x in views]))

    def writable(self, leaves: Sequence[Any]) -> bool:
        return False

    def leave(self, array: Any, leaf: object) -> mx.array:
        # What is kept shares the memory, in an object of its own: MLX lets users assign to elements.
        return made(array.data, array.dtype) if array.origin is None else mx.stop_gradient(array.origin)

    def leave_sum(self, wide: np.ndarray, x: HostArray, dtype: str | None) -> mx.array:
        return _of_numpy(super().leave_sum(wide, x, dtype))

    def leave_count(self, flags: Any, leaves: Sequence[Any]) -> mx.array:
        return _of_numpy(super().leave_count(flags, leaves).astype(np.int32))

    def leave_scalar(self, value: Any, dtype: str, leaves: Sequence[Any]) -> mx.array:
        return _of_numpy(super().leave_scalar(value, dtype, leaves))

    def leave_each(self, values: Any, dtype: str, leaves: Sequence[Any]) -> list[mx.array]:
        return list(map(_of_numpy, super().leave_each(values, dtype, leaves)))

    def scalar(self, value: Any, near: Sequence[Any]) -> Any:
        return np.float64(viewed(value).numbers()[0] if isinstance(value, mx.array) else value)

    def booleans(self, mask: object) -> np.ndarray:
        return np.asarray(mask, dtype=bool)


HOST = MlxHost()
_checked: type[HostBackend] = MlxHost


class Mlx(Framework):
    """MLX arrays on any device, and those that a transformation traces."""

    namespace = namespace

    def backend(self, leaves: Sequence[Any], scalars: Sequence[Any]) -> Backend:
        arrays = [x for x in (*leaves, *scalars) if isinstance(x, mx.array)]
        hidden = traced(arrays)
        if not hidden and not on_gpu():
            return HOST
        return Lazy(visible=not hidden, wide=wide_of(arrays))

    def on_host(self, leaf: mx.array) -> HostArray:
        return viewed(leaf)

    def beside(self, array: mx.array, like: mx.array) -> mx.array:
        return mx.stop_gradient(array)

    def is_traced(self, array: object) -> bool:
        return traced([array])

    generator = "a key of MLX"

    def noised(self, leaves: Sequence[mx.array], std: float, rng: Any) -> list[mx.array] | None:
        if not isinstance(rng, mx.array):
            return None
        if rng.dtype != mx.uint32 or rng.shape != (2,):
            kind = f"an array of {dtype_name(rng)} of shape {rng.shape}"
            raise TypeError(f"rng must be a key of MLX, as mx.random.key(seed) returns, got {kind}.")

        def noised(x: mx.array, key: mx.array) -> mx.array:
            wide = mx.float64 if x.dtype == mx.float64 else mx.float32
            return (x.astype(wide) + std * mx.random.normal(x.shape, wide, key=key)).astype(x.dtype)

        return list(map(noised, leaves, mx.random.split(rng, len(leaves))))

    def like(self, leaf: Any, dtype: str, values: np.ndarray) -> mx.array:
        data = values.astype(dtype_named(dtype))
        return made(data.view(np.uint16) if dtype == BFLOAT16.name else data, dtype)

    def zeros(self, shape: tuple[int, ...], leaf: mx.array) -> mx.array:
        return mx.zeros(shape, leaf.dtype)

    def as_float(self, array: Any) -> mx.array:
        return array_of(array).astype(mx.float32)


def wide_of(arrays: Sequence[mx.array]) -> Format:
    """Return the format to compute in: MLX's GPUs have no float64, and leave arrays of it to the CPU."""
    return FLOAT64 if not on_gpu() or any(x.dtype == mx.float64 for x in arrays) else FLOAT32


def traced(arrays: Sequence[Any]) -> bool:
    """Say whether a transformation of MLX traces one of these arrays, or records it for a derivative."""
    try:
        # MLX computes no such array behind its transformations' back, unless somebody waited for it. These are new.
        mx.async_eval([mx.stop_gradient(x) for x in arrays])
    except ValueError:
        return True
    return False


def viewed(array: mx.array) -> HostArray:
    """Return a view of an array's values."""
    return _views([array])[0]


def _views(arrays: Sequence[mx.array]) -> list[HostArray]:
    names = [bare_name(array.dtype) for array in arrays]
    numbers = [x.view(mx.uint16) if name == BFLOAT16.name else x for x, name in zip(arrays, names, strict=True)]
    mx.eval(numbers)  # all at once: each would be waited for
    views = zip(map(np.asarray, numbers), names, arrays, strict=True)
    return [HostArray(data, name, origin=array) for data, name, array in views]


def made(data: np.ndarray, dtype: str) -> mx.array:
    """Return numbers in the named dtype (bfloat16: their bits) as a new array."""
    if dtype == BFLOAT16.name:
        return mx.array(data).view(mx.bfloat16)
    return mx.array(data, dtype=getattr(mx, dtype))


def _of_numpy(value: Any) -> mx.array:
    return made(np.asarray(value), dtype_name(value))


MLX = Mlx()
