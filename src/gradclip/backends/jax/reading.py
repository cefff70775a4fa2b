"""How XLA's code reads the numbers of a norm: once each, subnormals too, and with no float64 copy.

XLA's CPU code reads float32 and bfloat16 subnormals as zero, so there they are read by their bits. Before a sum of
anything but squares it writes all terms out, in float64. Where one reduction makes several sums it does not. So there
are two of each array: of ordinary numbers and of subnormal ones.
"""

from collections.abc import Sequence
from enum import Enum

import jax
import jax.numpy as jnp
from jax import lax

from gradclip.backends.formats import BFLOAT16, FLOAT32, format_of

FLUSHED = frozenset({FLOAT32, BFLOAT16})
"""The formats of which XLA's CPU code reads subnormals as zero, although float64 holds them."""

_SMALL, _BIG = 2.0**-400, 2.0**480
_UNIT = 2.0**600  # of big numbers, and its inverse that of small ones


class Reading(Enum):
    """How numbers of these formats are read."""

    AS_THEY_ARE = 0
    BITS = 1
    BITS_AT_ONCE = 2  # by one reduction of several arrays, for which partitioned code would gather results


def magnitude_bits(x: jax.Array) -> jax.Array:
    """Return the bits of |x| as unsigned integers, which are in the order of the magnitudes, NaN last."""
    sizes = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
    return lax.bitcast_convert_type(x, sizes[x.dtype.itemsize]) & ((1 << (8 * x.dtype.itemsize - 1)) - 1)


def as_integers(x: jax.Array) -> jax.Array:
    """Return a float32 or bfloat16 array in float64, subnormals too."""
    subnormal, magnitude = _subnormal(x)
    below_normal = jnp.where(jnp.signbit(x), -magnitude, magnitude)
    return jnp.where(subnormal, below_normal, x.astype(jnp.float64))


def both_kinds(x: jax.Array) -> list[jax.Array]:
    """Return a float32 or bfloat16 array in float64, zero where it is subnormal, and these magnitudes, zero elsewhere.

    For the CPU's code a choice between them would be one step too many before a sum.
    """
    subnormal, magnitude = _subnormal(x)
    return [jnp.where(subnormal, 0.0, x.astype(jnp.float64)), jnp.where(subnormal, magnitude, 0.0)]


def _subnormal(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return where numbers are subnormal or zero, and their magnitudes there in float64."""
    magnitude = magnitude_bits(x).astype(jnp.int32)
    return magnitude < 1 << (format_of(x).precision - 1), magnitude.astype(jnp.float64) * format_of(x).step


def nearest(wide: jax.Array) -> jax.Array:
    """Return non-negative float64 numbers in float32, rounded to nearest, subnormals too."""
    units = jnp.round(jnp.where(wide < FLOAT32.tiny, wide, 0.0) / FLOAT32.step).astype(jnp.int32)
    below_normal = lax.bitcast_convert_type(units, jnp.float32)
    return jnp.where(wide < FLOAT32.tiny, below_normal, wide.astype(jnp.float32))


def sums(terms: Sequence[jax.Array], axes: tuple[int, ...]) -> Sequence[jax.Array]:
    """Return the sums of arrays of one shape over axes, by one reduction."""

    def added(totals: Sequence[jax.Array], terms: Sequence[jax.Array]) -> list[jax.Array]:
        return [total + term for total, term in zip(totals, terms, strict=True)]

    found: Sequence[jax.Array] = lax.reduce(list(terms), [jnp.zeros((), x.dtype) for x in terms], added, axes)
    return found


def extremes(bits: jax.Array, axes: tuple[int, ...]) -> Sequence[jax.Array]:
    """Return the largest and the smallest of unsigned integers over axes, by one reduction."""

    def further(found: Sequence[jax.Array], numbers: Sequence[jax.Array]) -> list[jax.Array]:
        return [jnp.maximum(found[0], numbers[0]), jnp.minimum(found[1], numbers[1])]

    ends = [jnp.zeros((), bits.dtype), jnp.full((), jnp.iinfo(bits.dtype).max, bits.dtype)]
    largest, smallest = lax.reduce([bits, bits], ends, further, axes)
    # So the largest needs both: XLA would drop a result that is not used, and a reduction of one array is not fused.
    return [jnp.maximum(largest, smallest), smallest]


def by_range(wide: jax.Array) -> list[jax.Array]:
    """Return float64 numbers as three arrays, each zero where others are not: small ones, others, big ones, in units.

    Their squares stay in the range, of which 2**40 can be added.
    """
    magnitude = jnp.abs(wide)
    small, big = magnitude < _SMALL, magnitude > _BIG
    # A unit that is chosen: compilers may square a constant by itself, and that leaves the range.
    scaled = magnitude * jnp.where(small, _UNIT, jnp.where(big, 1.0 / _UNIT, 1.0))
    return [jnp.where(small, scaled, 0.0), jnp.where(small | big, 0.0, scaled), jnp.where(big, scaled, 0.0)]


def joined(by_range: Sequence[jax.Array], p: float) -> tuple[jax.Array, jax.Array]:
    """Return the sum of such powers of order 1 or 2, and its divisor. Small ones are nothing beside big ones."""
    small, middle, big = by_range
    any_big, only_small = big > 0, (middle == 0) & (small > 0)
    of_middle, of_small = jnp.where(any_big, 1.0 / _UNIT, 1.0), jnp.where(only_small, 1.0, 1.0 / _UNIT)
    for _ in range(int(p)):  # what this makes subnormal is nothing beside what it is added to
        middle, small = middle * of_middle, small * of_small
    total = jnp.where(any_big, big + middle, middle + small)
    return total, jnp.where(any_big, _UNIT, jnp.where(only_small, 1.0 / _UNIT, 1.0))
