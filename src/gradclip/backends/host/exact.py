"""Decide in exact arithmetic whether a norm is at most the threshold; compute exact distances.

This is needed only if the computed norm is within its error bound of the threshold, as for the gradient (3, 4) and the
threshold 5. Magnitudes and squares are added exactly: terms are cut at a common unit, so that a sum of the upper parts
has at most 53 bits and is exact in any order, and the remainders are cut again (Rump, Ogita and Oishi, "Accurate
floating-point summation", 2008). The square of a float64 is two terms: the rounded square and its rounding error
(Dekker, "A floating-point technique for extending the available precision", 1971). Powers above 2 are first computed as
pairs of numbers with some 100 bits. If that does not decide, equal magnitudes are counted, and their powers added as
integers of any size.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any, Protocol

import numpy as np

from gradclip.backends.host.arrays import HostArray, HostArrays, split, viewed_arrays, wide_chunks
from gradclip.core.arrays import Arrays

LARGEST_POWER = 1024
_LARGEST_IN_PAIRS = 256
_MOST_WORK = 1_000_000  # distinct magnitudes times the order: about 0.2 s
_FAR_APART, _LARGEST_SCALE = 400, 1000
_PAIRS_ERROR = 2.0**-70
_PLAIN_VALUES = 4

Pairs = tuple[np.ndarray, np.ndarray]


class Threaded(Protocol):
    """What is asked of the backend of the arrays."""

    def threads(self) -> int:
        """Return how many threads a call may use."""


def decidable(p: float, *, any_complex: bool) -> bool:
    """Return whether norms of order `p` can be compared exactly. For complex numbers, p must be 2 or infinite."""
    return math.isinf(p) or p == 2 or (not any_complex and p.is_integer() and p <= LARGEST_POWER)


def at_most(backend: Threaded, arrays: Arrays, p: float, max_norm: float | Fraction, *, patient: bool = False) -> bool:
    """Return whether the norm of order `p` of finite arrays in host memory is <= `max_norm`, a finite number.

    Also return False, which clips, if this cannot be decided: `p` is not `decidable`, or the norms are too close and
    there are too many distinct magnitudes (any number of them is added if `patient`).
    """
    if not decidable(p, any_complex=arrays.any_complex):
        return not arrays.any_complex and _alone_at_most(arrays, max_norm)
    if math.isinf(p):
        return _extreme_at_most(arrays, p, max_norm)
    power, limit = int(p), Fraction(max_norm) ** int(p)
    if power > 2:
        difference = excess_of_powers(_wide_chunks(arrays), power, max_norm)
        if difference is not None:
            return difference < 0
    total = power_sum(backend, arrays, p, patient=patient)
    return isinstance(total, Fraction) and total <= limit


def part_of(arrays: Arrays, place: tuple[Any, ...]) -> HostArrays:
    """Return the part of a single array in host memory that an index selects."""
    (x,) = arrays
    counted = None if x.counted is None else np.asarray(x.counted[place])
    return viewed_arrays([HostArray(np.asarray(x.data[place]), x.dtype, counted=counted)])


def power_sum(backend: Threaded, arrays: Arrays, p: float, *, patient: bool = False) -> Fraction | float:
    """Return the exact sum of the powers |v|**p of finite arrays in host memory; NaN if it cannot be computed."""
    if math.isinf(p) or not decidable(p, any_complex=arrays.any_complex):
        return math.nan
    power = int(p)
    if power <= 2:
        return _plain_sum(backend, arrays, power)
    most = math.inf if patient else _MOST_WORK // power
    counted: Counter[float] = Counter()
    for chunk in _wide_chunks(arrays)():
        counted.update(_counted(np.abs(chunk[chunk != 0])))
        if len(counted) > most:
            return math.nan
    return sum((count * Fraction(v) ** power for v, count in counted.items()), Fraction(0))


def _wide_chunks(arrays: Iterable[HostArray]) -> Callable[[], Iterator[np.ndarray]]:
    """Return a function that yields the real numbers of arrays in host memory as float64 pieces."""
    return lambda: chain.from_iterable(wide_chunks(part) for x in arrays for part in x.parts())


# Magnitudes and squares


def _plain_sum(backend: Threaded, arrays: Arrays, p: int) -> Fraction:
    known, others = split(arrays)
    total = Fraction(0)
    if known:
        digits, exponent = known.exact_sum(p, backend.threads())
        total += _times_power(int.from_bytes(digits, "little"), exponent)
    for chunk in _wide_chunks(others)():
        total += sum(_parts_of_sum(chunk, p), Fraction(0))
    return total


def _times_power(number: int, exponent: int) -> Fraction:
    """Return number * 2**exponent."""
    zeros = (number & -number).bit_length() - 1 if number else 0
    return Fraction(number >> zeros) * Fraction(2) ** (exponent + zeros)


def _parts_of_sum(x: np.ndarray, p: int) -> Iterator[Fraction]:
    """Yield numbers that add up to the sum of |v|**p, p being 1 or 2, of at most 2**20 numbers."""
    for scaled, exponent in _in_turns(np.abs(x[x != 0])):
        for terms in [scaled] if p == 1 else _exact_squares(scaled):
            for part in _exact_parts(terms):
                yield Fraction(part) * Fraction(2) ** (p * exponent)


def _in_turns(magnitudes: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Yield groups of numbers, at most 2**400 apart, divided by a power of two near the largest, and its exponent."""
    while magnitudes.size:
        exponent = int(np.clip(np.frexp(magnitudes.max())[1], -_LARGEST_SCALE, _LARGEST_SCALE))
        near = magnitudes >= np.ldexp(1.0, exponent - _FAR_APART)
        yield magnitudes[near] * 2.0**-exponent, exponent
        magnitudes = magnitudes[~near]


def _exact_parts(terms: np.ndarray) -> Iterator[float]:
    """Yield numbers that add up to the sum of the terms, exactly."""
    headroom = terms.size.bit_length()
    largest = np.abs(terms).max(initial=0.0)
    while largest > 0:
        shift = 1.5 * 2.0 ** (int(np.frexp(largest)[1]) + headroom)
        high = (terms + shift) - shift
        yield float(high.sum())
        terms = terms - high
        largest = np.abs(terms).max()


def _exact_squares(x: np.ndarray) -> list[np.ndarray]:
    """Return terms whose exact sum is that of the squares of `x`, numbers far from the ends of the range."""
    square, lacking = _square((x, None))
    return [square, lacking] if lacking.any() else [square]


# Higher powers


def excess_of_powers(
    chunks: Callable[[], Iterable[np.ndarray]], power: int, max_norm: float | Fraction
) -> Fraction | None:
    """Return the sum of the powers minus that of `max_norm`, in some unit; None if the error may be larger."""
    if power > _LARGEST_IN_PAIRS:
        return None
    exponent = math.frexp(max_norm)[1]
    limit = (Fraction(max_norm) / Fraction(2) ** exponent) ** power
    total = Fraction(0)
    for chunk in chunks():
        high, low = _power(np.ldexp(np.abs(chunk), -exponent), power)
        for terms in (high, low):
            numbers = _condensed(terms)
            if not np.isfinite(numbers).all():
                return None
            total += sum(map(Fraction, numbers))
    difference = total - limit
    return difference if abs(difference) > limit * Fraction(_PAIRS_ERROR) else None


def _condensed(terms: np.ndarray) -> tuple[float, float]:
    """Return two numbers that add up to the sum of at most 2**20 terms, with a relative error below 2**-80.

    Terms are added in pairs. The rounding error of each addition, found exactly (Knuth's TwoSum), goes into a separate
    sum. Over 20 levels these errors are at most 20 * 2**-53 of the sum, and adding 2**20 of them errs by at most 2**20
    * 2**-53 of that.
    """
    errors = 0.0
    while terms.size > 1:
        half = terms.size // 2
        left, right = terms[:half], terms[half : 2 * half]
        total = left + right
        shift = total - left
        errors += float(np.sum((left - (total - shift)) + (right - shift)))
        terms = np.concatenate([total, terms[2 * half :]])
    return (float(terms[0]), errors) if terms.size else (0.0, 0.0)


def _power(x: np.ndarray, power: int) -> Pairs:
    """Return x**power as pairs of numbers, with a relative error below power * 2**-100 if nothing underflows."""
    base: tuple[np.ndarray, Any] = (x, None)
    result: Any = None
    while True:
        if power % 2:
            result = base if result is None else _times(result, base)
        power //= 2
        if not power:
            return result[0], np.zeros_like(x) if result[1] is None else result[1]
        base = _square(base)


def _square(x: tuple[np.ndarray, Any]) -> Pairs:
    return _times(x, x)


def _times(x: tuple[np.ndarray, Any], y: tuple[np.ndarray, Any]) -> Pairs:
    """Multiply pairs of numbers. A low part of None is zero; if both are None, the product is exact (Dekker)."""
    (a, a_low), (b, b_low) = x, y
    product = a * b
    head, tail = _halves(a)
    other_head, other_tail = (head, tail) if b is a else _halves(b)
    lacking = ((head * other_head - product) + head * other_tail + tail * other_head) + tail * other_tail
    if a_low is not None:
        lacking += a_low * b
    if b_low is not None:
        lacking += a * b_low
    if a_low is None and b_low is None:
        return product, lacking
    total = product + lacking
    return total, lacking - (total - product)


def _halves(x: np.ndarray) -> Pairs:
    """Split each number into two parts of at most 26 bits."""
    shifted = x * 134217729.0
    head = shifted - (shifted - x)
    return head, x - head


def _counted(magnitudes: np.ndarray) -> dict[float, int]:
    """Return how often each number occurs; fast if there are few distinct ones, as in sign gradients."""
    found: dict[float, int] = {}
    for _ in range(_PLAIN_VALUES):
        if not magnitudes.size:
            return found
        others = magnitudes[magnitudes != magnitudes[0]]
        found[float(magnitudes[0])] = magnitudes.size - others.size
        magnitudes = others
    values, counts = np.unique(magnitudes, return_counts=True)
    return found | dict(zip(values.tolist(), counts.tolist(), strict=True))


# The largest and the smallest magnitude, and orders without an exact power sum


def _extreme_at_most(arrays: Arrays, p: float, max_norm: float | Fraction) -> bool:
    """Compare the largest magnitude (the smallest for -inf), by squares to cover complex numbers."""
    found = [extreme_square(x, p) for x in arrays if math.prod(x.shape)]
    return not found or (max if p > 0 else min)(found) <= Fraction(max_norm) ** 2


def extreme_square(x: HostArray, p: float) -> Fraction:
    """Return the exact square of an extreme magnitude, found among the elements close to it in float64."""
    near = set()
    for pieces in zip(*map(wide_chunks, x.parts()), strict=True):
        real = np.abs(pieces[0])
        imaginary = np.abs(pieces[1]) if len(pieces) > 1 else np.zeros_like(real)
        sizes = np.hypot(real * 0.25, imaginary * 0.25)
        extreme = sizes.max() if p > 0 else sizes.min()
        close = np.abs(sizes - extreme) <= extreme * 2.0**-50 + 2.0**-1070
        near |= set(zip(real[close].tolist(), imaginary[close].tolist(), strict=True))
    return (max if p > 0 else min)(Fraction(a) ** 2 + Fraction(b) ** 2 for a, b in near)


def _alone_at_most(arrays: Arrays, max_norm: float | Fraction) -> bool:
    """Return whether at most one element is nonzero and its magnitude, which is then the norm, is <= `max_norm`."""
    found: list[float] = []
    for chunk in _wide_chunks(arrays)():
        found += np.abs(chunk[chunk != 0])[:2].tolist()
        if len(found) > 1:
            return False
    return not found or found[0] <= max_norm


# Distances


def squared_distance(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> Fraction:
    """Return the exact sum of the squares of all differences. The arrays hold finite float64 numbers or integers."""
    return sum((_squared_difference(x, y) for x, y in zip(first, second, strict=True)), Fraction(0))


def _squared_difference(x: np.ndarray, y: np.ndarray) -> Fraction:
    x, y = x[x != y], y[x != y]
    if x.dtype.kind in "biu":
        return Fraction(int(((x.astype(object) - y.astype(object)) ** 2).sum()))
    exponents = [np.frexp(z[z != 0])[1] for z in (x, y)]
    lowest = min(int(e.min(initial=1024)) for e in exponents)
    difference = _in_units(x, lowest) - _in_units(y, lowest)
    return Fraction(int((difference * difference).sum())) * Fraction(2) ** (2 * (lowest - 53))


def _in_units(x: np.ndarray, exponent: int) -> np.ndarray:
    """Return float64 numbers, whose exponents are at least `exponent`, as integers of any size."""
    mantissa, exponents = np.frexp(x)
    shifts = np.where(x == 0, 0, exponents - exponent)
    return (mantissa * 2.0**53).astype(np.int64).astype(object) << shifts.astype(object)
