"""Multiply many tensors by one number, with products rounded to nearest (see `core.one_factor`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Format, format_of, is_complex
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
            wide += tf.clip_by_value(wide, -step, step) * tf.cast(steps, wide.dtype)
        product = tf.cast(wide, x.dtype)
    return without_nonfinite(product) if blanks else product


def without_nonfinite(x: tf.Tensor) -> tf.Tensor:
    """Replace NaN and infinities by zeros. A complex element is replaced as a whole."""
    parts = [tf.math.real(x), tf.math.imag(x)] if is_complex(x) else [x]
    finite = [tf.math.is_finite(part) for part in parts]
    return tf.where(finite[0] if len(finite) == 1 else finite[0] & finite[1], x, tf.zeros_like(x))
