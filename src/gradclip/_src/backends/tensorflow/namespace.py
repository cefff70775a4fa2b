"""The operations of the array API standard that clipping needs, for TensorFlow tensors.

TensorFlow does not mix dtypes. Here, a number or a NumPy array is converted to the dtype of the tensor it meets.
`tf.function` can record every operation, and XLA can compile it.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

float16, bfloat16, float32, float64 = tf.float16, tf.bfloat16, tf.float32, tf.float64
complex64, complex128, int32, int64 = tf.complex64, tf.complex128, tf.int32, tf.int64
nan, inf = float("nan"), float("inf")

Axis = int | Sequence[int] | None

abs = tf.abs
sqrt, round, real, imag = tf.sqrt, tf.round, tf.math.real, tf.math.imag
exp, any, all = tf.exp, tf.reduce_any, tf.reduce_all
zeros_like, ones_like, add = tf.zeros_like, tf.ones_like, tf.add
reshape, permute_dims, broadcast_to, sort = tf.reshape, tf.transpose, tf.broadcast_to, tf.sort


def asarray(value: object, dtype: tf.DType | None = None) -> tf.Tensor:
    """Convert a value to a tensor, in `dtype` if given."""
    if isinstance(value, tf.Tensor | tf.Variable):
        return tf.convert_to_tensor(value) if dtype is None else tf.cast(value, dtype)
    return tf.convert_to_tensor(np.asarray(value) if dtype is None else np.asarray(value, dtype.as_numpy_dtype))


def astype(x: tf.Tensor, dtype: Any) -> tf.Tensor:
    """Cast a tensor to a TensorFlow dtype, or to one given by name. Python's `int` means int64."""
    return tf.cast(x, tf.int64 if dtype is int else dtype)


def isfinite(x: tf.Tensor) -> tf.Tensor:
    """Say which elements are finite. A complex number is finite if both parts are."""
    if not x.dtype.is_complex:
        return tf.math.is_finite(x)
    return tf.math.is_finite(tf.math.real(x)) & tf.math.is_finite(tf.math.imag(x))


def isnan(x: tf.Tensor) -> tf.Tensor:
    """Say which elements are NaN. A complex number is NaN if either part is."""
    if not x.dtype.is_complex:
        return tf.math.is_nan(x)
    return tf.math.is_nan(tf.math.real(x)) | tf.math.is_nan(tf.math.imag(x))


def isinf(x: tf.Tensor) -> tf.Tensor:
    """Say which elements are infinite. A complex number is infinite if either part is."""
    if not x.dtype.is_complex:
        return tf.math.is_inf(x)
    return tf.math.is_inf(tf.math.real(x)) | tf.math.is_inf(tf.math.imag(x))


def beside(value: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Convert real factors to complex numbers if `like` is complex."""
    return tf.cast(value, like.dtype) if like.dtype.is_complex else value


def _alike(*values: object) -> list[tf.Tensor]:
    """Convert the values to tensors with the dtype of the first tensor."""
    dtype = next((x.dtype for x in values if isinstance(x, tf.Tensor | tf.Variable)), None)
    return [x if isinstance(x, tf.Tensor) else tf.convert_to_tensor(x, dtype) for x in values]


def where(condition: object, x: object, y: object) -> tf.Tensor:
    """Return the elements of `x` where the condition holds, and those of `y` elsewhere."""
    return tf.where(condition, *_alike(x, y))


def maximum(x: object, y: object) -> tf.Tensor:
    """Return the elementwise maximum, NaN where one element is NaN."""
    return tf.maximum(*_alike(x, y))


def minimum(x: object, y: object) -> tf.Tensor:
    """Return the elementwise minimum, NaN where one element is NaN."""
    return tf.minimum(*_alike(x, y))


def clip(x: tf.Tensor, lower: object, upper: object) -> tf.Tensor:
    """Clamp each element to [lower, upper]. NaN stays NaN."""
    return minimum(maximum(x, lower), upper)


def hypot(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return sqrt(x**2 + y**2) without intermediate overflow or underflow."""
    x, y = tf.abs(x), tf.abs(y)
    large, small = tf.maximum(x, y), tf.minimum(x, y)
    plain = (large > 0) & tf.math.is_finite(large)
    ratio = tf.where(plain, small, tf.zeros_like(small)) / tf.where(plain, large, tf.ones_like(large))
    return tf.where(plain, large * tf.sqrt(1.0 + ratio * ratio), large)


def trunc(x: tf.Tensor) -> tf.Tensor:
    """Round each element toward zero to an integer. Zeros have the sign of the element."""
    return tf.where(tf.abs(x) < 1, x * 0.0, tf.sign(x) * tf.floor(tf.abs(x)))


def frexp(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the fraction in [0.5, 1) and the exponent of each normal float64 number."""
    bits = tf.bitcast(x, tf.int64)
    exponent = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, tf.constant(52, tf.int64)), 0x7FF) - 1022
    half = tf.constant(np.float64(0.5).view(np.int64))
    kept = tf.bitwise.bitwise_and(bits, tf.constant(-(0x7FF << 52) - 1, tf.int64))
    return tf.bitcast(tf.bitwise.bitwise_or(kept, half), tf.float64), exponent


def sum(x: tf.Tensor, axis: Axis = None, dtype: tf.DType | None = None) -> tf.Tensor:
    """Return the sum over axes. The sum of booleans counts the true ones."""
    x = tf.cast(x, dtype or tf.int32) if dtype is not None or x.dtype is tf.bool else x
    return tf.reduce_sum(x, axis=axis)


def max(x: tf.Tensor, axis: Axis = None) -> tf.Tensor:
    """Return the maximum over axes, NaN if an element is NaN."""
    return _or_nan(tf.reduce_max(x, axis=axis), x, axis)


def min(x: tf.Tensor, axis: Axis = None) -> tf.Tensor:
    """Return the minimum over axes, NaN if an element is NaN."""
    return _or_nan(tf.reduce_min(x, axis=axis), x, axis)


def _or_nan(found: tf.Tensor, x: tf.Tensor, axis: Axis) -> tf.Tensor:
    # XLA's CPU code ignores NaN.
    return where(tf.reduce_any(tf.math.is_nan(x), axis=axis), nan, found)


def stack(arrays: Sequence[Any], axis: int = 0) -> tf.Tensor:
    """Stack tensors of one shape along a new axis."""
    return tf.stack(_alike(*arrays), axis=axis)


def concat(arrays: Sequence[tf.Tensor], axis: int = 0) -> tf.Tensor:
    """Concatenate tensors along an axis."""
    return tf.concat(arrays, axis=axis)


def matmul(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return the product of two vectors or matrices."""
    return tf.tensordot(x, y, 1)


def full_like(x: tf.Tensor, value: float) -> tf.Tensor:
    """Return a tensor like `x`, filled with one number."""
    return tf.zeros_like(x) + tf.convert_to_tensor(value, x.dtype)


def take(x: tf.Tensor, indices: tf.Tensor, axis: int) -> tf.Tensor:
    """Return the entries at these places of an axis."""
    return tf.gather(x, indices, axis=axis)


def take_along_axis(x: tf.Tensor, indices: tf.Tensor, axis: int) -> tf.Tensor:
    """Return the elements at indices along the last axis."""
    if axis not in (-1, x.ndim - 1):
        raise NotImplementedError("take_along_axis supports only the last axis")
    return tf.gather(x, indices, axis=-1, batch_dims=x.ndim - 1)


def result_type(*values: Any) -> tf.DType:
    """Return the dtype that can hold the numbers of all tensors and dtypes."""
    dtypes = [x if isinstance(x, tf.DType) else x.dtype for x in values]
    wide = builtins.any(dtype.name in ("float64", "complex128") for dtype in dtypes)
    if builtins.any(dtype.is_complex for dtype in dtypes):
        return tf.complex128 if wide else tf.complex64
    return tf.float64 if wide else dtypes[0] if len(set(dtypes)) == 1 else tf.float32


def isdtype(dtype: tf.DType, kind: str) -> bool:
    """Say whether a dtype is of a kind. Clipping only needs "complex floating"."""
    if kind != "complex floating":
        raise NotImplementedError(f"isdtype does not support the kind {kind!r}")
    return dtype.is_complex


def finfo(dtype: tf.DType) -> Any:
    """Return the limits of a floating-point dtype."""
    return np.finfo(dtype.as_numpy_dtype)
