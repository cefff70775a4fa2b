"""Decide in exact arithmetic whether a norm is at most the threshold; compute exact distances.

This is needed only if the computed norm is within its error bound of the threshold, as for the gradient (3, 4) and the
threshold 5. Magnitudes and squares are added exactly: terms are cut at a common unit, so that a sum of the upper parts
has at most 53 bits and is exact in any order, and the remainders are cut again (Rump, Ogita and Oishi, "Accurate
floating-point summation", 2008). The square of a float64 is two terms: the rounded square and its rounding error
(Dekker, "A floating-point technique for extending the available precision", 1971). Powers above 2 are first computed as
pairs of numbers with some 100 bits. If that does not decide, they are added as integers of any size
(`exact_powers`). Of other orders, and of complex numbers, powers are added where they are rational (`exact_roots`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any, Protocol

import numpy as np

from gradclip._src.backends.host import exact_roots
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
        return exact_roots.at_most(_complex_chunks(arrays), p, max_norm)
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
