"""Sums of powers that need roots, of complex magnitudes or of orders such as 1.5: exact where the roots are.

Let s = (|v| / C)**2 for a number v and the threshold C: a rational number, also for complex v. The norm of order p is
at most C if the sum of all s**(p / 2) is at most 1. An order is a float, so p / 2 = m / 2**k with integers m and k. If
k square roots of each s, one after the other, are rational, as for v = 3 + 4j, C = 5 and p = 1, so is the sum. If not,
the sum is irrational, because positive roots of rational numbers do not cancel. Then the norm is not C, but may be so
close that which is larger stays open.
"""

import math
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction

import numpy as np

_MOST_DISTINCT = 3000
_MOST_BITS = 300_000  # of all different powers together; to add them takes about 0.1 s


def at_most(chunks: Iterable[np.ndarray], p: float, max_norm: float | Fraction) -> bool:
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
    for value, square in squares.items():
        power = _power(square / limit, Fraction(p) / 2, _MOST_BITS // len(squares))
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
