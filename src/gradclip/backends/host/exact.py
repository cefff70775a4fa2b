"""Decide in exact arithmetic whether a norm is at most the threshold; compute exact distances.

This is needed only if the computed norm is within its error bound of the threshold, as for the gradient (3, 4) and the
threshold 5. The kernels add magnitudes and squares exactly; of numbers that they cannot read, these are added as
integers of any size. Higher powers are first computed as integers of about 128 bits. If that does not decide, equal
magnitudes are counted, and their powers added as fractions.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any, Protocol

import numpy as np

from gradclip.backends.host.arrays import HostArray, HostArrays, split, viewed_arrays, wide_chunks
from gradclip.core.arrays import Arrays

LARGEST_POWER = 1024
_MOST_WORK = 1_000_000  # distinct magnitudes times the order: about 0.2 s
_DIGITS = 128  # binary digits after the point


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
    known = _nearly(arrays, int(p), max_norm) if p > 2 else None
    if known is not None:
        return known
    total = power_sum(backend, arrays, p, patient=patient)
    return isinstance(total, Fraction) and total <= Fraction(max_norm) ** int(p)


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
    for values, counts in _distinct(arrays):
        counted.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        if len(counted) > most:
            return math.nan
    return sum((count * Fraction(v) ** power for v, count in counted.items()), Fraction(0))


def _wide_chunks(arrays: Iterable[HostArray]) -> Iterator[np.ndarray]:
    """Yield the real numbers of arrays in host memory as float64 pieces."""
    return chain.from_iterable(wide_chunks(part) for x in arrays for part in x.parts())


def _plain_sum(backend: Threaded, arrays: Arrays, p: int) -> Fraction:
    """Return the exact sum of magnitudes or squares."""
    known, others = split(arrays)
    total = Fraction(0)
    if known:
        digits, exponent = known.exact_sum(p, backend.threads())
        total += _times_power(int.from_bytes(digits, "little"), exponent)
    for chunk in _wide_chunks(others):
        lowest = _lowest_exponent(chunk)
        total += _times_power(int((_in_units(np.abs(chunk), lowest) ** p).sum()), p * (lowest - 53))
    return total


def _times_power(number: int, exponent: int) -> Fraction:
    """Return number * 2**exponent."""
    zeros = (number & -number).bit_length() - 1 if number else 0
    return Fraction(number >> zeros) * Fraction(2) ** (exponent + zeros)


# Higher powers


def _nearly(arrays: Arrays, power: int, max_norm: float | Fraction) -> bool | None:
    """Return whether the sum of the powers is at most that of `max_norm`; None if they are too close to tell.

    Magnitudes are at most `max_norm`, or the answer is no. They are divided by it, and the quotient v and all products
    are rounded down to multiples of the unit 2**-128. If a power is less than a units too small, and another less than
    b units, their product is less than a + b + 1 units too small. So v**p is less than 2 * p units too small.
    """
    one, total, number = 1 << _DIGITS, 0, 0
    for values, counts in _distinct(arrays):
        if values.size and float(values[-1]) > max_norm:
            return False
        if values.size:
            lowest = _lowest_exponent(values)
            scale = Fraction(2) ** (lowest - 53 + _DIGITS) / Fraction(max_norm)
            quotients = _in_units(values, lowest) * scale.numerator // scale.denominator
            total += int((_power(quotients, power) * counts.astype(object)).sum())
            number += int(counts.sum())
    if total > one:
        return False
    return True if total + 2 * power * number <= one else None


def _power(x: np.ndarray, power: int) -> np.ndarray:
    """Return x**power, in units of 2**-128 like `x`. Each product is rounded down."""
    result: Any = None
    while True:
        if power % 2:
            result = x if result is None else result * x >> _DIGITS
        power //= 2
        if not power:
            return result
        x = x * x >> _DIGITS


def _distinct(arrays: Iterable[HostArray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the distinct magnitudes of each piece except zero, in ascending order, and how often they occur."""
    for chunk in _wide_chunks(arrays):
        yield np.unique(np.abs(chunk[chunk != 0]), return_counts=True)


# The largest and the smallest magnitude, and orders without an exact power sum


def _extreme_at_most(arrays: Arrays, p: float, max_norm: float | Fraction) -> bool:
    """Compare the largest magnitude (the smallest for -inf), by squares to cover complex numbers."""
    found = [_extreme_square(x, p) for x in arrays if math.prod(x.shape)]
    return not found or (max if p > 0 else min)(found) <= Fraction(max_norm) ** 2


def _extreme_square(x: HostArray, p: float) -> Fraction:
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
    for chunk in _wide_chunks(arrays):
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
    lowest = min(map(_lowest_exponent, (x, y)))
    difference = _in_units(x, lowest) - _in_units(y, lowest)
    return _times_power(int((difference * difference).sum()), 2 * (lowest - 53))


def _lowest_exponent(x: np.ndarray) -> int:
    """Return the exponent of the smallest float64 number except zero."""
    return int(np.frexp(x[x != 0])[1].min(initial=1024))


def _in_units(x: np.ndarray, exponent: int) -> np.ndarray:
    """Return float64 numbers, whose exponents are at least `exponent`, as integers of any size."""
    mantissa, exponents = np.frexp(x)
    shifts = np.where(x == 0, 0, exponents - exponent)
    return (mantissa * 2.0**53).astype(np.int64).astype(object) << shifts.astype(object)
