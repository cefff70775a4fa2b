"""The backend for TensorFlow graphs (`tf.function`, XLA) and for accelerators. It does not read values to compute.

TensorFlow's own CPU code and XLA read subnormal numbers of float32, bfloat16 and float64 as zeros, and flush results
that small to zero. The floor of a norm allows for these numbers.

A square in float32 is rounded once, and goes through at most 15 additions before it is widened to float64. So the sums
in float32 have a relative error of at most 16 * 2**-24. Squares and sums below the normal range may become zero. Each
of these loses less than 2**-126, so n elements lose less than n * 2**-125.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from gradclip._src.backends.portable import Portable
from gradclip._src.backends.tensorflow import namespace
from gradclip._src.backends.tensorflow.derivative import call_differentiably
from gradclip._src.core.arrays import Arrays, checked_dtype
from gradclip._src.core.coefficient import not_above_integer
from gradclip._src.core.formats import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    Format,
    format_of,
    is_complex,
    low_bits_mask,
    sum_dtype,
)
from gradclip._src.core.layouts import Layout, Scope
from gradclip._src.core.protocols import Backend
from gradclip._src.core.rules import Into, OneFactor
from gradclip._src.core.values import elements_of

if TYPE_CHECKING:
    from gradclip._src.core.rules import OneFactor


Numbers = dict[str, tf.Tensor]


def elements_by_format(arrays: Arrays) -> dict[Format, int]:
    """Return the number of elements of each format, the widest first. Complex tensors count as their two parts."""
    widest_first = [element for element in (FLOAT64, FLOAT32, BFLOAT16, FLOAT16) if element in arrays.formats]
    return {element: _count(arrays, element) for element in widest_first}


def multiplied(arrays: Arrays, by: OneFactor) -> list[tf.Tensor]:
    """Return the tensors, multiplied."""
    if by.sizes is None:
        return _multiplied(list(arrays), by.factors, by.steps, blanks=by.blanks)
    results, rest = [], iter(arrays)
    for layer, size in enumerate(by.sizes):
        factors = {dtype: of_each[layer] for dtype, of_each in by.factors.items()}
        steps = None if by.steps is None else by.steps[layer]
        results += _multiplied([next(rest) for _ in range(size)], factors, steps, blanks=by.blanks)
    return results


def _count(arrays: Arrays, element: Format) -> int:
    """Return the number of real numbers in this format."""
    return sum(elements_of(x.shape) * (2 if is_complex(x) else 1) for x in arrays if format_of(x) is element)


def assigned(leaf: Any, result: tf.Tensor) -> Any:
    """Return the clipped gradient. If the gradient is a variable, assign the result to it and return the variable."""
    if not isinstance(leaf, tf.Variable):
        return result
    leaf.assign(shaped_like(leaf, result))
    return leaf


def shaped_like(leaf: object, result: tf.Tensor) -> tf.Tensor:
    """Restore the leaf's shape if the leaf was flattened to a vector because its rank is unknown."""
    unknown = isinstance(leaf, tf.Tensor | tf.Variable) and leaf.shape.rank is None
    return tf.reshape(result, tf.shape(leaf)) if unknown else result


def _multiplied(
    tensors: Sequence[tf.Tensor], factors: Numbers, steps: tf.Tensor | None, *, blanks: bool
) -> list[tf.Tensor]:
    """Multiply each tensor by the number for its dtype. Tensors are returned unchanged if that number is 1."""
    if not tensors:
        return []

    def products() -> list[tf.Tensor]:
        return [_product(x, factors[format_of(x).name], steps, blanks=blanks) for x in tensors]

    # Either all numbers are 1, or none is. A device that flushes subnormals changes them even in a product with 1.
    kept = next(iter(factors.values())) == 1
    if tf.executing_eagerly():  # `tf.cond` would wait for the device
        return [tf.where(kept, x, y) for x, y in zip(tensors, products(), strict=True)]
    found = tf.cond(kept, lambda: list(map(tf.identity, tensors)), products)
    return found if isinstance(found, list) else [found]


def _product(x: tf.Tensor, factor: tf.Tensor, steps: tf.Tensor | None, *, blanks: bool) -> tf.Tensor:
    if is_complex(x):
        parts = (_product(part, factor, steps, blanks=False) for part in (tf.math.real(x), tf.math.imag(x)))
        product = tf.complex(*parts)
    else:
        wide = tf.cast(x, factor.dtype) * factor
        if steps is not None and format_of(x) is FLOAT16:
            step = tf.constant(FLOAT16.step, wide.dtype)
            moved = wide + tf.clip_by_value(wide, -step, step) * tf.cast(steps, wide.dtype)
            wide = tf.where(moved == 0, wide * 0.0, moved)  # zeros keep their sign
        product = tf.cast(wide, x.dtype)
    return without_nonfinite(product) if blanks else product


def without_nonfinite(x: tf.Tensor) -> tf.Tensor:
    """Replace NaN and infinities by zeros. A complex element is replaced as a whole."""
    parts = [tf.math.real(x), tf.math.imag(x)] if is_complex(x) else [x]
    finite = [tf.math.is_finite(part) for part in parts]
    return tf.where(finite[0] if len(finite) == 1 else finite[0] & finite[1], x, tf.zeros_like(x))


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


class Graph(Portable):
    """The backend for symbolic tensors, and for eager tensors on any device."""

    divisors_above = FLOAT64.tiny
    divisors_up_to = 1.0 / FLOAT64.tiny  # XLA multiplies by the inverse

    def __init__(self, *, visible: bool) -> None:
        super().__init__(namespace, FLOAT64)
        self.visible = visible
        # The sums with first additions in float32, or None if such sums are not allowed.
        self.some_at_a_time: list[tf.Tensor] | None = None

    def flushed_below(self, element: Format) -> float:
        return 0.0 if element is FLOAT16 else element.tiny

    def prepare(self, leaf: object) -> tf.Tensor:
        return prepared(leaf)

    def prepare_in_place(self, leaf: object) -> tf.Tensor:
        return _ranked(tf.convert_to_tensor(leaf))

    def writable(self, leaves: Sequence[Any]) -> bool:
        return False  # assigning to a variable does not write into its old memory

    def scale(self, arrays: Arrays, coefficient: Any, layout: Layout, into: Into | None = None) -> Sequence[Any]:
        if not isinstance(coefficient, OneFactor):
            return super().scale(arrays, coefficient, layout, into)
        results = multiplied(arrays, coefficient)
        return results if into is None else self.write(results, into)

    def write(self, results: Sequence[tf.Tensor], into: Into) -> list[Any]:
        return list(map(assigned, into.leaves, results))

    def leave(self, array: tf.Tensor, leaf: Any) -> tf.Tensor:
        return shaped_like(leaf, array)

    def leave_sum(self, wide: tf.Tensor, x: tf.Tensor, dtype: str | None) -> tf.Tensor:
        return tf.cast(wide, sum_dtype(x, wide, dtype))

    def leave_count(self, flags: tf.Tensor, leaves: Sequence[Any]) -> tf.Tensor:
        return namespace.sum(flags, dtype=tf.int64)

    def leave_scalar(self, value: tf.Tensor, dtype: str, leaves: Sequence[Any]) -> tf.Tensor:
        return tf.cast(value, dtype)

    def booleans(self, mask: object) -> tf.Tensor:
        return tf.cast(tf.convert_to_tensor(mask), tf.bool)

    def scalar(self, value: float | tf.Tensor | np.ndarray, near: Sequence[tf.Tensor]) -> tf.Tensor:
        if isinstance(value, tf.Tensor) and value.dtype.is_integer:
            return not_above_integer(self, value)
        return namespace.asarray(value, tf.float64)

    def zeros(self, shape: tuple[int, ...], near: Sequence[tf.Tensor]) -> tf.Tensor:
        return tf.zeros(shape, tf.float64)

    def bits(self, x: tf.Tensor) -> tf.Tensor:
        return tf.bitcast(x, tf.int64 if x.dtype == tf.float64 else tf.int32)

    def from_bits(self, bits: tf.Tensor) -> tf.Tensor:
        return tf.bitcast(bits, tf.float64 if bits.dtype == tf.int64 else tf.float32)

    def complex(self, real: tf.Tensor, imag: tf.Tensor) -> tf.Tensor:
        return tf.complex(real, imag)

    def narrow(self, x: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
        source, target = format_of(x), format_of(like)
        if source is target or target is FLOAT16:
            return super().narrow(x, like)
        # A conversion may flush numbers below the normal range, or round them up. Make them zero.
        normal = namespace.where(tf.abs(x) < target.tiny, x * 0.0, x)
        return tf.cast(self.from_bits(self.bits(normal) & low_bits_mask(source, target)), like.dtype)

    def clamped(self, x: tf.Tensor, bound: float | tf.Tensor) -> tf.Tensor:
        found = super().clamped(x, bound)
        if isinstance(bound, float) and bound > 0:
            return found
        # Of two zeros, TensorFlow's minimum and maximum return either.
        zeros = tf.where(tf.math.is_nan(x), x, tf.where(tf.math.is_inf(x), tf.sign(x), x) * 0.0)
        return tf.where(self.limit(bound, x) == 0, zeros, found)

    def multiplied(self, x: tf.Tensor, first: tf.Tensor, second: tf.Tensor | None) -> tf.Tensor:
        # TensorFlow would turn x * first * second into x * (first * second), which may leave the range. It leaves this
        # operation alone. It differs from a plain product only where `second` is zero, and that is never so.
        product = x * first
        return product if second is None else tf.math.multiply_no_nan(product, second)

    def not_above(self, product: tf.Tensor) -> tf.Tensor:
        """Return the product, or zero if it is below the normal range, where a device may or may not flush."""
        return namespace.where(tf.abs(product) < format_of(product).tiny, product * 0.0, product)

    def with_care(self, compute: Callable[[Any], Any], arrays: Arrays, count: int) -> Any:
        if self.visible or not any(map(_adds_some_at_a_time, arrays)):
            return compute(self)
        quick = copy.copy(self)
        quick.some_at_a_time = []
        value, divisor = found = compute(quick)
        if not quick.some_at_a_time:
            return found
        size = value if divisor is None else value * divisor
        # Then float32 has lost less than 2**-29 of the sum, and nothing has overflowed.
        sure = tf.math.is_finite(size) & (size > math.sqrt(count) * 2.0**-48)
        chosen = tf.cond(tf.reduce_all(sure), lambda: _tensors(*found), lambda: _tensors(*compute(self)))
        return chosen[0], None if divisor is None else chosen[1]

    def sum_error(self, count: int, arrays: Arrays, p: float, scope: Scope) -> float:
        error = super().sum_error(count, arrays, p, scope)
        quick = p == 2 and scope.whole and any(map(_adds_some_at_a_time, arrays))
        return error + ERROR_AT_A_TIME * (1.0 + 2.0**-20) + 2.0**-28 if quick else error

    def power_sum_of(self, x: tf.Tensor, p: float, scope: Scope, divisor: tf.Tensor | None) -> tf.Tensor:
        if p != 2 or divisor is not None or not scope.whole:
            return super().power_sum_of(x, p, scope, divisor)
        if self.some_at_a_time is not None and _adds_some_at_a_time(x):
            found = list(map(some_at_a_time, self.parts(x)))
            self.some_at_a_time += found
        elif compiled_by_xla():  # XLA fuses all of this into one loop, without a copy
            return super().power_sum_of(x, p, scope, divisor)
        else:
            found = list(map(in_pieces, self.parts(x)))
        return found[0] if len(found) == 1 else found[0] + found[1]

    def largest_of(self, x: tf.Tensor, scope: Scope) -> tf.Tensor:
        found = super().largest_of(x, scope)
        return namespace.where(found < 0, 0.0, found)  # -inf if the tensor turns out to be empty

    def smallest(self, arrays: Arrays, scope: Scope) -> tf.Tensor:
        found = super().smallest(arrays, scope)
        return namespace.where(found == math.inf, 0.0, found)  # if all tensors turn out to be empty

    def unstacked(self, vectors: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        return list(map(tf.unstack, vectors))

    def without_nonfinite(self, arrays: Arrays) -> Arrays:
        return Arrays(list(map(without_nonfinite, arrays)), arrays.dtypes)

    def multi_tensor(self, arrays: Arrays) -> Mapping[Format, int]:
        return elements_by_format(arrays)

    def redo_where(
        self, flags: tf.Tensor, compute: Callable[[], tuple[tf.Tensor, tf.Tensor]], found: tuple[tf.Tensor, tf.Tensor]
    ) -> Any:
        again = partial(super().redo_where, flags, compute, found)
        return tf.cond(tf.reduce_any(flags), again, lambda: tuple(map(tf.identity, found)))

    def differentiable(self, function: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        return partial(call_differentiably, function, rule)


_checked: type[Backend] = Graph


def prepared(leaf: object) -> tf.Tensor:
    """Return a leaf as a tensor. A tensor of unknown rank becomes a vector."""
    return checked_dtype(_ranked(tf.convert_to_tensor(leaf)))


def _adds_some_at_a_time(x: tf.Tensor) -> bool:
    return is_large(x) and format_of(x) is not FLOAT64


def _ranked(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tensor, [-1]) if tensor.shape.rank is None else tensor


def _tensors(value: tf.Tensor, divisor: tf.Tensor | None) -> list[tf.Tensor]:
    return [tf.identity(value), tf.ones_like(value) if divisor is None else tf.identity(divisor)]
