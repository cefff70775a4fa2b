"""Sums of squares of large tensors in graphs: in pieces that stay in cache, with the first additions in float32.

A square in float32 is rounded once, and goes through at most 15 additions before it is widened to float64. So the sums
in float32 have a relative error of at most 16 * 2**-24. Squares and sums below the normal range may become zero. Each
of these loses less than 2**-126, so n elements lose less than n * 2**-125.
"""

import math

import tensorflow as tf

# TensorFlow has no public way to ask whether a graph is recorded for XLA.
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from gradclip._src.core.formats import FLOAT32

# A widened piece of this size stays in cache. More pieces than `_PIECES` would make the graph too large.
_PIECE, _PIECES = 1 << 18, 64
_AT_A_TIME = 16
LARGE = 1 << 12  # elements
ERROR_AT_A_TIME = _AT_A_TIME * FLOAT32.roundoff


def compiled_by_xla() -> bool:
    """Say whether the graph being recorded is for XLA."""
    return not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def is_large(x: tf.Tensor) -> bool:
    """Say whether a tensor is known to be so large that extra operations pay off."""
    return None not in x.shape and math.prod(x.shape) >= LARGE


def some_at_a_time(x: tf.Tensor) -> tf.Tensor:
    """Return the sum of squares of a large real tensor. Groups of sixteen squares are added in float32."""
    flat = tf.cast(tf.reshape(x, [-1]), tf.float32)
    # XLA processes a whole tensor in one loop, so it needs no pieces.
    pieces = [flat] if compiled_by_xla() else _pieces(flat)
    return _total([found for piece in pieces for found in _columns(piece)])


def _columns(x: tf.Tensor) -> list[tf.Tensor]:
    whole = x.shape[0] // _AT_A_TIME * _AT_A_TIME
    rows = tf.reshape(x[:whole], [_AT_A_TIME, -1])
    found = [tf.reduce_sum(tf.cast(tf.reduce_sum(rows * rows, axis=0), tf.float64))]
    return found if whole == x.shape[0] else [*found, _widened(x[whole:])]


def in_pieces(x: tf.Tensor) -> tf.Tensor:
    """Return the sum of squares of a real tensor, added in float64, piece by piece."""
    return _total(list(map(_widened, _pieces(x))))


def _widened(x: tf.Tensor) -> tf.Tensor:
    # `l2_loss` returns half the sum of squares, and does not store the squares.
    return 2.0 * tf.nn.l2_loss(tf.cast(x, tf.float64))


def _total(found: list[tf.Tensor]) -> tf.Tensor:
    return found[0] if len(found) == 1 else tf.add_n(found)


def _pieces(x: tf.Tensor) -> list[tf.Tensor]:
    """Split a tensor into pieces that stay in cache. A small tensor, or one of unknown size, is not split."""
    if None in x.shape or math.prod(x.shape) < 2 * _PIECE:
        return [x]
    size = math.prod(x.shape)
    step = max(_PIECE, -(-size // (_PIECES * 1024)) * 1024)  # a multiple of 1024, so that slices need no copy
    flat = tf.reshape(x, [size])
    return [flat[start : start + step] for start in range(0, size, step)]
