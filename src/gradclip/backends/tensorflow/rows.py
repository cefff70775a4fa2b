"""The rows of a `tf.IndexedSlices`: pieces of one row are merged to clip them, and kept if nothing changes."""

from typing import Any

import tensorflow as tf

_HALVES = {tf.float16, tf.bfloat16}
_WIDE = {tf.complex64: tf.complex128, tf.complex128: tf.complex128}


def merged(values: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    """Merge the pieces of each row: put their sum at the row's first piece, and zeros at its other pieces.

    Sums are rounded once, from float64. Half types become float32, where the sum of their pieces fits.
    """
    count = tf.shape(indices)[0]
    # Sort, because the number of distinct rows is unknown, and a compiler needs static shapes.
    order = tf.argsort(indices, stable=True)
    ordered = tf.gather(indices, order)
    begins = tf.concat([tf.equal(ordered[:1], ordered[:1]), tf.not_equal(ordered[1:], ordered[:-1])], 0)
    row = tf.scatter_nd(order[:, None], tf.cumsum(tf.cast(begins, tf.int32)) - 1, [count])
    first = tf.gather(tf.math.unsorted_segment_min(tf.range(count), row, count), row)
    alone = tf.gather(tf.math.unsorted_segment_sum(tf.ones_like(row), row, count), row) == 1
    if tf.executing_eagerly() and bool(tf.reduce_all(alone)):
        return values
    given = tf.cast(values, tf.float32) if values.dtype in _HALVES else values
    wide = tf.cast(values, _WIDE.get(values.dtype, tf.float64))
    sums = tf.cast(tf.math.unsorted_segment_sum(wide, first, count), given.dtype)
    # Do not add zero to a row with one piece: that would turn -0.0 into 0.0 and flush subnormals.
    shape = tf.concat([[count], tf.ones([tf.rank(values) - 1], tf.int32)], 0)
    return tf.where(tf.reshape(alone, shape), given, sums)


def pieces(array: tf.IndexedSlices, before: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Return the pieces of other rows: those of the array if the rows are those `before`, else the rows themselves."""
    values = tf.convert_to_tensor(array.values)
    if before is values:  # no row has several pieces
        return rows
    return tf.where(_same(before, rows), values, _toward_zero(rows, values))


def _same(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Say whether all elements are finite and have the same bits. A comparison of numbers may flush some to zero."""
    if x.dtype.is_complex:
        return _same(tf.math.real(x), tf.math.real(y)) & _same(tf.math.imag(x), tf.math.imag(y))
    bits = tf.int64 if x.dtype == tf.float64 else tf.int32 if x.dtype == tf.float32 else tf.int16
    return tf.reduce_all(tf.math.is_finite(x) & (tf.bitcast(x, bits) == tf.bitcast(y, bits)))


def _toward_zero(x: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Convert float32 numbers to the half type of `like`. The largest number takes the place of larger ones."""
    if x.dtype == like.dtype:
        return x

    @tf.custom_gradient
    def converted(x: tf.Tensor) -> Any:
        if like.dtype == tf.bfloat16:  # the first half of the bits of float32
            found = tf.cast(tf.bitcast(tf.bitcast(x, tf.int32) & -(1 << 16), tf.float32), tf.bfloat16)
        else:
            nearest = tf.cast(x, like.dtype)
            bits = tf.bitcast(nearest, tf.int16)
            larger = tf.abs(tf.cast(nearest, x.dtype)) > tf.abs(x)
            found = tf.bitcast(tf.where(larger, bits - 1, bits), like.dtype)
        return found, lambda slope: tf.cast(slope, x.dtype)

    return converted(x)
