"""The operations of the array API standard for MLX arrays: MLX's own, and those that it lacks or calls otherwise."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

_BITS = {mx.float32: mx.int32, mx.float64: mx.int64}
_FLOATS = {bits: dtype for dtype, bits in _BITS.items()}
_RUN = 1 << 12  # float32 numbers that may be added one after the other


def __getattr__(name: str) -> Any:
    return getattr(mx, name)


def asarray(value: Any, dtype: Any = None, *, copy: bool | None = None) -> mx.array:
    """Convert a value to an array, in `dtype` if given."""
    if not isinstance(value, mx.array):
        return mx.array(value, dtype=dtype)
    made = mx.stop_gradient(value) if copy else value  # another object, which assignments to the first do not reach
    return made if dtype is None else made.astype(dtype)


def astype(x: mx.array, dtype: Any) -> mx.array:
    """Convert an array to a dtype, or to one given by name. Python's `int` means int64."""
    named = getattr(mx, dtype) if isinstance(dtype, str) else dtype
    return x.astype(mx.int64 if named is int else named)


def clip(x: mx.array, min: Any = None, max: Any = None) -> mx.array:
    """Clamp each element to [min, max]. NaN stays NaN."""
    return mx.clip(x, min, max)


def sum(x: mx.array, axis: Any = None) -> mx.array:
    """Add in runs: MLX's CPU code adds one number after the other, and float32 numbers would lose too much."""
    axes = range(x.ndim) if axis is None else [axis % x.ndim] if isinstance(axis, int) else axis
    count = math.prod(x.shape[i] for i in axes)
    if count <= _RUN or x.dtype == mx.float64:
        return mx.sum(x, axis)
    kept = [i for i in range(x.ndim) if i not in axes]
    shape = [x.shape[i] for i in kept]
    runs, rest = mx.split(x.transpose(*kept, *axes).reshape(*shape, count), [count // _RUN * _RUN], -1)
    return sum(mx.sum(runs.reshape(*shape, -1, _RUN), -1), -1) + mx.sum(rest, -1)


def trunc(x: mx.array) -> mx.array:
    """Round numbers below 2**31 toward zero. Larger ones become any number."""
    whole = x.astype(mx.int32).astype(x.dtype)  # MLX's own function chooses by the sign, which takes longer
    return mx.where(whole == 0, x * 0.0, whole)


def hypot(x: mx.array, y: mx.array) -> mx.array:
    """Return sqrt(x**2 + y**2) without overflow or underflow on the way."""
    x, y = mx.abs(x), mx.abs(y)
    large, small = mx.maximum(x, y), mx.minimum(x, y)
    plain = (large > 0) & (large < math.inf)
    ratio = mx.where(plain, small, 0.0) / mx.where(plain, large, 1.0)
    return mx.where(plain, large * mx.sqrt(1.0 + ratio * ratio), large)


def frexp(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return the fraction in [0.5, 1) and the exponent of each normal float32 or float64 number."""
    precision, bias = (24, 126) if x.dtype == mx.float32 else (53, 1022)
    kept, field = bits(x), (2 * bias + 3) << (precision - 1)
    exponent = mx.right_shift(kept & field, precision - 1) - bias
    return from_bits((kept & ~field) | (bias << (precision - 1))), exponent


def complex_of(real: mx.array, imag: mx.array) -> mx.array:
    """Return complex64 numbers, the only ones of MLX, with these parts. A sum with 1j would spoil infinities."""
    return mx.stack([real, imag], axis=-1).astype(mx.float32).view(mx.complex64).squeeze(-1)


def bits(x: mx.array) -> mx.array:
    """Return the bits of float32 or float64 numbers as integers."""
    return x.view(_BITS[x.dtype])


def from_bits(x: mx.array) -> mx.array:
    """Return the numbers with these bits."""
    return x.view(_FLOATS[x.dtype])
