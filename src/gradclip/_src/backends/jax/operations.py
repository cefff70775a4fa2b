"""Operations on arrays in XLA that JAX lacks: choices, several sums at once, weighted sums, subnormal numbers.

XLA's CPU code reads float32 and bfloat16 subnormals as zero, so where they count they are decoded from their bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from gradclip._src.backends.jax.placement import varying_alike
from gradclip._src.core.formats import BFLOAT16, FLOAT32, format_of

if TYPE_CHECKING:
    from gradclip._src.core.rules import Coefficient

FLUSHED = frozenset({FLOAT32, BFLOAT16})
"""Formats with subnormals that XLA's CPU code reads as zero, although float64 can hold them."""

_AT_A_TIME = 4  # examples; the fastest of 1, 4, 8 and 16


def either(flags: jax.Array, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Return `then()` if any flag is set, else `otherwise()`. Both return the same types."""
    flag = jnp.any(flags)
    if isinstance(flag, jax.core.Tracer):
        return lax.cond(flag, then, otherwise)
    # Outside traced code, `lax.cond` would compile again at every call, and JAX would keep every program.
    return then() if flag else otherwise()


def as_integers(x: jax.Array) -> jax.Array:
    """Convert a float32 or bfloat16 array to float64, subnormals included."""
    subnormal, magnitude = _subnormal(x)
    below_normal = jnp.where(jnp.signbit(x), -magnitude, magnitude)
    return jnp.where(subnormal, below_normal, x.astype(jnp.float64))


def both_kinds(x: jax.Array) -> list[jax.Array]:
    """Convert a float32 or bfloat16 array to two float64 arrays.

    The first has the normal numbers, with zeros at subnormals. The second has the magnitudes of the subnormals, with
    zeros elsewhere. Merging both before a sum would keep XLA's CPU code from fusing them into it.
    """
    subnormal, magnitude = _subnormal(x)
    return [jnp.where(subnormal, 0.0, x.astype(jnp.float64)), jnp.where(subnormal, magnitude, 0.0)]


def _subnormal(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a mask of the subnormals and zeros, and their magnitudes in float64."""
    width = 8 * x.dtype.itemsize
    magnitude = (lax.bitcast_convert_type(x, f"uint{width}") & ((1 << (width - 1)) - 1)).astype(jnp.int32)
    return magnitude < 1 << (format_of(x).precision - 1), magnitude.astype(jnp.float64) * format_of(x).step


def nearest(wide: jax.Array) -> jax.Array:
    """Convert non-negative float64 numbers to float32, rounded to nearest, subnormals included."""
    units = jnp.round(jnp.where(wide < FLOAT32.tiny, wide, 0.0) / FLOAT32.step).astype(jnp.int32)
    below_normal = lax.bitcast_convert_type(units, jnp.float32)
    return jnp.where(wide < FLOAT32.tiny, below_normal, wide.astype(jnp.float32))


def sums(terms: Sequence[jax.Array], axes: tuple[int, ...]) -> Sequence[jax.Array]:
    """Return the sums of several arrays of one shape over axes, with one reduction."""

    def added(totals: Sequence[jax.Array], terms: Sequence[jax.Array]) -> list[jax.Array]:
        return [total + term for total, term in zip(totals, terms, strict=True)]

    found: Sequence[jax.Array] = lax.reduce(list(terms), [jnp.zeros((), x.dtype) for x in terms], added, axes)
    return found


def sum_by_rows(x: jax.Array, coefficient: Coefficient, widen: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Multiply each example of a real array by its coefficient, and sum over the first axis in float64."""
    total = _sum_of_rows(as_rows(x, 1), coefficient, widen)
    return total.reshape(x.shape[1:])


def _sum_of_rows(x: jax.Array, coefficient: Coefficient, widen: Callable[[jax.Array], jax.Array]) -> jax.Array:
    weights = coefficient.weights(jnp)
    # Slice half-precision data as integers. Otherwise XLA first copies the whole batch to float32.
    bits = lax.bitcast_convert_type(x, jnp.uint16) if format_of(x).precision < FLOAT32.precision else x

    def plus(total: jax.Array, i: jax.Array | int) -> jax.Array:
        row = lax.dynamic_index_in_dim(bits, i, keepdims=False)
        row = row if bits is x else lax.bitcast_convert_type(row, x.dtype)
        product = widen(row) * weights.first[i]
        product = product if weights.second is None else product * weights.second[i]
        return total + jnp.where(coefficient.blank[i], 0.0, product)

    def body(block: jax.Array, total: jax.Array) -> jax.Array:
        for j in range(_AT_A_TIME):
            total = plus(total, block * _AT_A_TIME + j)
        return total

    blocks = x.shape[0] // _AT_A_TIME
    total, _ = varying_alike(jnp.zeros(x.shape[1:], weights.first.dtype), x)
    total = lax.fori_loop(0, blocks, body, total) if blocks else total
    for i in range(blocks * _AT_A_TIME, x.shape[0]):
        total = plus(total, i)
    return total


def as_rows(x: jax.Array, axes: int) -> jax.Array:
    """Flatten all axes after the first `axes` into one."""
    return x.reshape(*x.shape[:axes], math.prod(x.shape[axes:]))
