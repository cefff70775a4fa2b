"""Decide in exact arithmetic whether a norm is at most the threshold; compute exact distances.

This is needed only if the computed norm is within its error bound of the threshold, as for the gradient (3, 4) and the
threshold 5. Magnitudes and squares are added exactly: terms are cut at a common unit, so that a sum of the upper parts
has at most 53 bits and is exact in any order, and the remainders are cut again (Rump, Ogita and Oishi, "Accurate
floating-point summation", 2008). The square of a float64 is two terms: the rounded square and its rounding error
(Dekker, "A floating-point technique for extending the available precision", 1971). Powers above 2 are first computed as
pairs of numbers with some 100 bits. If that does not decide, they are added as integers of any size
(`exact_powers`). Of other orders, and of complex numbers, powers are added where they are rational (`roots_at_most`).

Sums of powers that need roots, of complex magnitudes or of orders such as 1.5: exact where the roots are.
Let s = (|v| / C)**2 for a number v and the threshold C: a rational number, also for complex v. The norm of order p is
at most C if the sum of all s**(p / 2) is at most 1. An order is a float, so p / 2 = m / 2**k with integers m and k. If
k square roots of each s, one after the other, are rational, as for v = 3 + 4j, C = 5 and p = 1, so is the sum. If not,
the sum is irrational, because positive roots of rational numbers do not cancel. Then the norm is not C, but may be so
close that which is larger stays open.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any, Protocol

import numpy as np

from gradclip._src.backends.host.arrays import HostArray, HostArrays, split, viewed_arrays, wide_chunks
from gradclip._src.backends.host.exact_powers import (
    PowerSum,
    counted,
    excess_of_powers,
    joined,
    square,
    times_power_of_two,
)
from gradclip._src.core.arrays import Arrays

_MOST_DISTINCT = 3000
_MOST_BITS = 300_000  # of all different powers together; to add them takes about 0.1 s


def roots_at_most(chunks: Iterable[np.ndarray], p: float, max_norm: float | Fraction) -> bool:
    """Return whether the norm of order `p` of finite complex128 numbers is <= `max_norm`; False if that stays open."""
    counts: Counter[complex] = Counter()
    for chunk in chunks:
        values, times = np.unique(np.abs(chunk.real) + 1j * np.abs(chunk.imag), return_counts=True)
        counts.update(dict(zip(values.tolist(), times.tolist(), strict=True)))
        if len(counts) > _MOST_DISTINCT:
            return False
    del counts[0j]
    limit, total = Fraction(max_norm) ** 2, Fraction(0)
    squares = {value: Fraction(value.real) ** 2 + Fraction(value.imag) ** 2 for value in counts}
    if any(square > limit for square in squares.values()):
        return False
    if counts.total() <= 1:
        return True
    for value, squared in squares.items():
        power = _power(squared / limit, Fraction(p) / 2, _MOST_BITS // len(squares))
        if power is None:
            return False
        total += counts[value] * power
    return total <= 1


def _power(base: Fraction, exponent: Fraction, most_bits: int) -> Fraction | None:
    """Return a power of a number in (0, 1]; None if it is irrational or longer than `most_bits`."""
    roots = exponent.denominator
    while roots > 1 and base != 1:
        above, below = math.isqrt(base.numerator), math.isqrt(base.denominator)
        if above**2 != base.numerator or below**2 != base.denominator:
            return None
        base, roots = Fraction(above, below), roots // 2
    too_long = base != 1 and exponent.numerator * base.denominator.bit_length() > most_bits
    return None if too_long else base**exponent.numerator


LARGEST_POWER = 1024
_MOST_WORK = 1_000_000  # distinct magnitudes times the order: about 0.2 s
_FAR_APART, _LARGEST_SCALE = 400, 1000


class Threaded(Protocol):
    """What is asked of the backend of the arrays."""

    def threads(self) -> int:
        """Return how many threads a call may use."""


def decidable(p: float, *, any_complex: bool) -> bool:
    """Return whether norms of order `p` can be compared exactly. For complex numbers, p must be 2 or infinite."""
    return math.isinf(p) or p == 2 or (not any_complex and p.is_integer() and p <= LARGEST_POWER)


def at_most(backend: Threaded, arrays: Arrays, p: float, max_norm: float | Fraction, *, patient: bool = False) -> bool:
    """Return whether the norm of order `p` of finite arrays in host memory is <= `max_norm`, a finite number.

    Also return False, which clips, if this cannot be decided: `p` is not `decidable` and some power is irrational, or
    the norms are too close and there are too many distinct magnitudes (any number of them is added if `patient`).
    """
    if not decidable(p, any_complex=arrays.any_complex):
        return roots_at_most(_complex_chunks(arrays), p, max_norm)
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
    chunks, total = joined(_wide_chunks(arrays)), PowerSum(power)
    if patient:
        total.add(chunks)
        return total.total()
    seen: set[float] = set()
    for chunk in chunks:
        magnitudes, counts = counted(chunk)
        seen.update(magnitudes.tolist())
        if len(seen) > _MOST_WORK // power:
            return math.nan
        total.add_counted(magnitudes, counts)
    return total.total()


def _wide_chunks(arrays: Iterable[HostArray]) -> Iterator[np.ndarray]:
    """Yield the real numbers of arrays in host memory as float64 pieces."""
    return chain.from_iterable(_finite_chunks(part) for x in arrays for part in x.parts())


def _complex_chunks(arrays: Iterable[HostArray]) -> Iterator[np.ndarray]:
    """Yield the numbers of arrays in host memory as complex128 pieces."""
    for x in arrays:
        for pieces in zip(*map(_finite_chunks, x.parts()), strict=True):
            yield pieces[0] + 1j * (pieces[1] if len(pieces) > 1 else 0.0)


def _finite_chunks(x: HostArray) -> Iterator[np.ndarray]:
    """Yield float64 copies of pieces. Raises, as the kernels do, if a number is not finite: sums would not end."""
    for chunk in wide_chunks(x):
        if not np.isfinite(chunk).all():
            raise RuntimeError(
                "An array holds NaN or an infinity that was not there a moment ago: another thread has written to it. "
                "Let that thread wait while norms are measured, or pass a copy."
            )
        yield chunk


# Magnitudes and squares


def _plain_sum(backend: Threaded, arrays: Arrays, p: int) -> Fraction:
    known, others = split(arrays)
    total = Fraction(0)
    if known:
        digits, exponent = known.exact_sum(p, backend.threads())
        total += times_power_of_two(int.from_bytes(digits, "little"), exponent)
    for chunk in _wide_chunks(others):
        total += sum(_parts_of_sum(chunk, p), Fraction(0))
    return total


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
    squares, lacking = square((x, None))
    return [squares, lacking] if lacking.any() else [squares]


# The largest and the smallest magnitude


def _extreme_at_most(arrays: Arrays, p: float, max_norm: float | Fraction) -> bool:
    """Compare the largest magnitude (the smallest for -inf), by squares to cover complex numbers."""
    found = [extreme_square(x, p) for x in arrays if math.prod(x.shape)]
    return not found or (max if p > 0 else min)(found) <= Fraction(max_norm) ** 2


def extreme_square(x: HostArray, p: float) -> Fraction:
    """Return the exact square of an extreme magnitude, found among the elements close to it in float64."""
    best = max if p > 0 else min
    found = []
    for pieces in zip(*map(_finite_chunks, x.parts()), strict=True):
        real = np.abs(pieces[0])
        imaginary = np.abs(pieces[1]) if len(pieces) > 1 else np.zeros_like(real)
        sizes = np.hypot(real * 0.25, imaginary * 0.25)
        extreme = sizes.max() if p > 0 else sizes.min()
        close = np.abs(sizes - extreme) <= extreme * 2.0**-50 + 2.0**-1070
        pairs = _closest(np.maximum(real, imaginary)[close], np.minimum(real, imaginary)[close], p)
        found.append(best(Fraction(a) ** 2 + Fraction(b) ** 2 for a, b in pairs))
    return best(found)


def _closest(large: np.ndarray, small: np.ndarray, p: float) -> Iterable[tuple[float, float]]:
    """Return those of pairs of numbers a >= b >= 0 of about one size, one of which has the extreme a**2 + b**2.

    They are few, whatever the pairs: the sums lie within 2**-90, and no two have the same a.
    """
    exponent = int(np.frexp(large.max())[1])
    (a, a_low), (b, b_low) = (square((np.ldexp(part, -exponent), None)) for part in (large, small))
    total = a + b
    low = ((a - total) + b) + (a_low + b_low)  # exact but for the last addition, because a >= b
    beyond = (total - total[0]) + (low - low[0])
    extreme = beyond.max() if p > 0 else beyond.min()
    close = np.abs(beyond - extreme) <= 2.0**-90
    large, small = large[close], small[close]
    order = np.lexsort((small if p > 0 else -small, large))
    large, small = large[order], small[order]
    last = np.append(large[1:] != large[:-1], True)
    return zip(large[last].tolist(), small[last].tolist(), strict=True)


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
