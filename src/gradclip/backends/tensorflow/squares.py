"""Sums of squares of large tensors in graphs: in pieces that stay in cache, and of float32 first a few at a time.

A square in float32 is rounded once, and takes part in at most 15 additions here before it is widened. So what is added
up in float32 has a relative error of at most 16 * 2**-24. What is below the normal range may become zero, in squares
and in sums: less than 2**-126 for each of these, so that n elements lose less than n * 2**-125.
"""

import math

import tensorflow as tf

# There is no public way to ask for whom a graph is recorded.
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from gradclip.backends.formats import FLOAT32

# A piece of a tensor that is widened stays in cache. More pieces than that would make the graph too large.
_PIECE, _PIECES = 1 << 18, 64
_AT_A_TIME = 16
LARGE = 1 << 12  # elements
ERROR_AT_A_TIME = _AT_A_TIME * FLOAT32.roundoff


def compiled_by_xla() -> bool:
    """Say whether the graph that is recorded now is for XLA."""
    return not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def is_large(x: tf.Tensor) -> bool:
    """Say whether a tensor is known to have enough elements for more operations to be worth it."""
    return None not in x.shape and math.prod(x.shape) >= LARGE


def some_at_a_time(x: tf.Tensor) -> tf.Tensor:
    """Return the sum of squares of a large real tensor, sixteen at a time added up in float32."""
    flat = tf.cast(tf.reshape(x, [-1]), tf.float32)
    # XLA makes one loop of a whole tensor.
    pieces = [flat] if compiled_by_xla() else _pieces(flat)
    return _total([found for piece in pieces for found in _columns(piece)])


def _columns(x: tf.Tensor) -> list[tf.Tensor]:
    whole = x.shape[0] // _AT_A_TIME * _AT_A_TIME
    rows = tf.reshape(x[:whole], [_AT_A_TIME, -1])
    found = [tf.reduce_sum(tf.cast(tf.reduce_sum(rows * rows, axis=0), tf.float64))]
    return found if whole == x.shape[0] else [*found, _widened(x[whole:])]


def in_pieces(x: tf.Tensor) -> tf.Tensor:
    """Return the sum of squares of a real tensor, widened."""
    return _total(list(map(_widened, _pieces(x))))


def _widened(x: tf.Tensor) -> tf.Tensor:
    # It adds up squares, and halves the sum, without a copy of them.
    return 2.0 * tf.nn.l2_loss(tf.cast(x, tf.float64))


def _total(found: list[tf.Tensor]) -> tf.Tensor:
    return found[0] if len(found) == 1 else tf.add_n(found)


def _pieces(x: tf.Tensor) -> list[tf.Tensor]:
    """Return a tensor in pieces that stay in cache; a small one, or one of unknown size, as it is."""
    if None in x.shape or math.prod(x.shape) < 2 * _PIECE:
        return [x]
    size = math.prod(x.shape)
    step = max(_PIECE, -(-size // (_PIECES * 1024)) * 1024)  # a multiple, so that slices are no copies
    flat = tf.reshape(x, [size])
    return [flat[start : start + step] for start in range(0, size, step)]
