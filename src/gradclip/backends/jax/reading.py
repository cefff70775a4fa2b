"""Read the elements of arrays for norms in XLA: once each, subnormals included, without a float64 copy.

XLA's CPU code reads float32 and bfloat16 subnormals as zero, so they are decoded from their bits. XLA also stores all
terms in float64 before it sums anything but squares, unless one reduction computes several sums. Therefore one
reduction computes two sums of each array: normal numbers and subnormals.
"""

from collections.abc import Sequence
from enum import Enum

import jax
import jax.numpy as jnp
from jax import lax

from gradclip.core.formats import BFLOAT16, FLOAT32, format_of

FLUSHED = frozenset({FLOAT32, BFLOAT16})
"""Formats with subnormals that XLA's CPU code reads as zero, although float64 can hold them."""

_SMALL, _BIG = 2.0**-400, 2.0**480
_UNIT = 2.0**600  # big numbers are in this unit, small ones in its inverse


class Reading(Enum):
    """How to read numbers of these formats."""

    AS_THEY_ARE = 0
    BITS = 1
    BITS_AT_ONCE = 2  # in one reduction of several arrays; partitioned code would gather the results


def magnitude_bits(x: jax.Array) -> jax.Array:
    """Return the bits of |x| as unsigned integers. They sort like the magnitudes, with NaN last."""
    sizes = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
    return lax.bitcast_convert_type(x, sizes[x.dtype.itemsize]) & ((1 << (8 * x.dtype.itemsize - 1)) - 1)


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
    magnitude = magnitude_bits(x).astype(jnp.int32)
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


def extremes(bits: jax.Array, axes: tuple[int, ...]) -> Sequence[jax.Array]:
    """Return the largest and the smallest of unsigned integers over axes, with one reduction."""

    def further(found: Sequence[jax.Array], numbers: Sequence[jax.Array]) -> list[jax.Array]:
        return [jnp.maximum(found[0], numbers[0]), jnp.minimum(found[1], numbers[1])]

    ends = [jnp.zeros((), bits.dtype), jnp.full((), jnp.iinfo(bits.dtype).max, bits.dtype)]
    largest, smallest = lax.reduce([bits, bits], ends, further, axes)
    # Make the largest depend on both. XLA drops an unused result, and does not fuse a reduction of one array.
    return [jnp.maximum(largest, smallest), smallest]


def by_range(wide: jax.Array) -> list[jax.Array]:
    """Split the magnitudes of float64 numbers into three arrays: small, middle and big ones, with zeros elsewhere.

    Small and big numbers are scaled by their units. All squares stay in range, and so do sums of up to 2**40 squares.
    """
    magnitude = jnp.abs(wide)
    small, big = magnitude < _SMALL, magnitude > _BIG
    # Select the unit with `where`: a compiler may square a constant factor separately, and that square overflows.
    scaled = magnitude * jnp.where(small, _UNIT, jnp.where(big, 1.0 / _UNIT, 1.0))
    return [jnp.where(small, scaled, 0.0), jnp.where(small | big, 0.0, scaled), jnp.where(big, scaled, 0.0)]


def joined(by_range: Sequence[jax.Array], p: float) -> tuple[jax.Array, jax.Array]:
    """Join the three sums of powers (order 1 or 2) into one sum and its divisor. Small ones vanish next to big ones."""
    small, middle, big = by_range
    any_big, only_small = big > 0, (middle == 0) & (small > 0)
    of_middle, of_small = jnp.where(any_big, 1.0 / _UNIT, 1.0), jnp.where(only_small, 1.0, 1.0 / _UNIT)
    for _ in range(int(p)):  # terms that become subnormal are negligible in the total
        middle, small = middle * of_middle, small * of_small
    total = jnp.where(any_big, big + middle, middle + small)
    return total, jnp.where(any_big, _UNIT, jnp.where(only_small, 1.0 / _UNIT, 1.0))
