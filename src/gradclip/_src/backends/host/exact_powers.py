"""Sums of integer powers above 2: in pairs of numbers, with some 100 bits, and exactly, as integers.

A float64 number is an integer m of 53 bits times a power of two. Numbers with the same power of two share a sum of
m**p, in digits of 24 bits, which are computed for many numbers at a time. So an exact sum takes a time in proportion to
how many numbers there are, whatever they are: who sends them chooses them.
"""

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np

_LARGEST_IN_PAIRS = 256
_PAIRS_ERROR = 2.0**-70
_LARGEST_IN_DIGITS = 48  # where Python's integers become as fast
_DIGIT = 24  # bits: sums of 2**15 products of two digits fit in 63 bits
_BLOCK = 1 << 13  # numbers at a time, so that their digits stay in the cache
_PRECISION = 53
_LOWEST = -1074 - _PRECISION  # below the exponent of any unit
_UNITS = 1024 - _LOWEST
_FEW = 4

Pairs = tuple[np.ndarray, np.ndarray]


class PowerSum:
    """The exact sum of |v|**p over the finite numbers that are added."""

    def __init__(self, power: int) -> None:
        self._power = power
        digits = -(-_PRECISION * power // _DIGIT) + 1 if power <= _LARGEST_IN_DIGITS else 0
        self._sums = np.zeros((digits, _UNITS), np.int64)
        self._integers: dict[int, int] = {}

    def add(self, chunks: Iterable[np.ndarray]) -> None:
        """Add the powers of float64 numbers in new arrays."""
        for chunk in joined(chunks):
            self.add_counted(*counted(chunk))

    def add_counted(self, magnitudes: np.ndarray, counts: np.ndarray) -> None:
        """Add the powers of positive numbers, each so many times; fewer than 2**28 numbers in all."""
        for start in range(0, magnitudes.size, _BLOCK):
            self._add_block(magnitudes[start : start + _BLOCK], counts[start : start + _BLOCK])

    def _add_block(self, magnitudes: np.ndarray, counts: np.ndarray) -> None:
        mantissas, exponents = np.frexp(magnitudes)
        whole = np.ldexp(mantissas, _PRECISION).astype(np.int64)
        seen = int(np.bitwise_or.reduce(whole))
        zeros = (seen & -seen).bit_length() - 1  # of narrower formats, many
        units = exponents + (zeros - _PRECISION - _LOWEST)
        if self._power > _LARGEST_IN_DIGITS:
            for unit, number, count in zip(units.tolist(), (whole >> zeros).tolist(), counts.tolist(), strict=True):
                self._integers[unit] = self._integers.get(unit, 0) + count * number**self._power
            return
        lowest = int(units.min())
        units -= lowest
        digits = _power_of_digits(_digits(whole >> zeros, seen.bit_length() - zeros), self._power)
        for sums, digit in zip(self._sums, digits, strict=False):
            # Whole numbers below 2**53, so adding them as floats is exact.
            found = np.bincount(units, digit * counts)
            sums[lowest : lowest + found.size] += found.astype(np.int64)

    def total(self) -> Fraction:
        """Return the sum."""
        total = 0
        for unit in np.flatnonzero(self._sums.any(axis=0)).tolist():
            of_unit = sum(digit << _DIGIT * place for place, digit in enumerate(self._sums[:, unit].tolist()))
            total += of_unit << self._power * unit
        total += sum(of_unit << self._power * unit for unit, of_unit in self._integers.items())
        return times_power_of_two(total, self._power * _LOWEST)


def joined(chunks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the numbers in arrays that are not small, but the last: each takes some time however few it has."""
    waiting: list[np.ndarray] = []
    size = 0
    for chunk in chunks:
        waiting.append(chunk)
        size += chunk.size
        if size >= _BLOCK:
            yield waiting[0] if len(waiting) == 1 else np.concatenate(waiting)
            waiting, size = [], 0
    if size:
        yield np.concatenate(waiting)


def counted(x: np.ndarray) -> Pairs:
    """Return the distinct magnitudes above 0 and how often each occurs; fast if they are few, as in sign gradients."""
    magnitudes = np.abs(x[x != 0])
    values: list[float] = []
    counts: list[int] = []
    while magnitudes.size and len(values) < _FEW:
        others = magnitudes[magnitudes != magnitudes[0]]
        values.append(float(magnitudes[0]))
        counts.append(magnitudes.size - others.size)
        magnitudes = others
    rest, of_rest = np.unique(magnitudes, return_counts=True)
    return np.concatenate([values, rest]), np.concatenate([np.array(counts, np.int64), of_rest])


def times_power_of_two(number: int, exponent: int) -> Fraction:
    """Return number * 2**exponent."""
    zeros = (number & -number).bit_length() - 1 if number else 0
    return Fraction(number >> zeros) * Fraction(2) ** (exponent + zeros)


# Integers of any size, many at a time: a list of arrays of digits, the lowest first


def _digits(whole: np.ndarray, bits: int) -> list[np.ndarray]:
    """Return the digits of integers >= 0 with at most so many bits."""
    return [whole >> shift & ((1 << _DIGIT) - 1) for shift in range(0, bits, _DIGIT)]


def _power_of_digits(base: list[np.ndarray], power: int) -> list[np.ndarray]:
    result: list[np.ndarray] | None = None
    while True:
        if power % 2:
            result = base if result is None else _product(result, base)
        power //= 2
        if not power:
            assert result is not None
            return result
        base = _product(base, base)


def _product(x: list[np.ndarray], y: list[np.ndarray]) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    carry: Any = 0
    for place in range(len(x) + len(y) - 1):
        for i in range(max(0, place - len(y) + 1), min(place + 1, len(x))):
            carry = carry + x[i] * y[place - i]
        found.append(carry & ((1 << _DIGIT) - 1))
        carry = carry >> _DIGIT
    return [*found, carry] if carry.any() else found


# Pairs of numbers


def excess_of_powers(chunks: Iterable[np.ndarray], power: int, max_norm: float | Fraction) -> Fraction | None:
    """Return the sum of the powers minus that of `max_norm`, in some unit; None if the error may be larger."""
    if power > _LARGEST_IN_PAIRS:
        return None
    exponent = math.frexp(max_norm)[1]
    limit = (Fraction(max_norm) / Fraction(2) ** exponent) ** power
    total = Fraction(0)
    for chunk in joined(chunks):
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
        base = square(base)


def square(x: tuple[np.ndarray, Any]) -> Pairs:
    """Return the squares of pairs of numbers."""
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
