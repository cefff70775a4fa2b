"""The second look: the exact sum of powers, by which a norm is compared with a bound and its excess computed.

Let S be the sum of |x|**p, N its root and C the bound. Then N - C is (S - C**p) divided by the sum of N**k * C**(p-1-k)
over k from 0 to p-1. The numerator is exact and the terms below it are positive, so N needs few digits. The largest and
the smallest magnitude of complex numbers are roots of exact squares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import chain

import numpy as np

from gradclip._src.backends.host import exact
from gradclip._src.backends.host.arrays import HostArray, viewed_arrays, wide_chunks
from gradclip._src.backends.host.backend import HOST
from gradclip._src.backends.host.exact_powers import PowerSum, excess_of_powers
from gradclip._src.checks.measured import Gauge
from gradclip._src.core.norms import Order
from gradclip._src.files.stored import Stored

_DIGITS = 120  # binary digits of a root
_PAIRS_ENOUGH = Fraction(1, 2**17)
"""Relative to the bound: with a larger difference, the error of 2**-70 of sums in pairs is below the last bit."""


class ChangedError(ValueError):
    """Arrays that were finite at the first look hold NaN or infinity at the second."""


def above(arrays: Sequence[Stored], order: Order, max_norm: Fraction) -> tuple[float, float]:
    """Return the norm of finite arrays, and by how much it exceeds a bound: 0.0 exactly if it does not.

    Both are rounded once from numbers with about 100 bits; `inf` if they are beyond float64's range.
    """
    if order.p > 2 and not order.extreme:
        found = _above_in_pairs(arrays, int(order.p), max_norm)
        if found is not None:
            return found
    power = 1 if order.p == 1 else 2 if order.extreme else int(order.p)
    return _norm_and_excess(_power_sum(arrays, order), power, max_norm)


def _norm_and_excess(total: Fraction, power: int, max_norm: Fraction) -> tuple[float, float]:
    norm, beyond = root(total, power), total - max_norm**power
    if beyond <= 0:
        return as_float(norm), 0.0
    slope = sum((norm**k * max_norm ** (power - 1 - k) for k in range(power)), Fraction(0))
    return as_float(norm), max(as_float(beyond / slope), math.ulp(0.0))


def root(number: Fraction, power: int) -> Fraction:
    """Return the root of a number >= 0: exact for power 1, else with a relative error below 2**-119."""
    if power == 1 or not number:
        return number
    size = number.numerator.bit_length() - number.denominator.bit_length()
    exponent = size // power  # the root is near 2**exponent
    scaled = number * Fraction(2) ** (power * (_DIGITS - exponent))
    return Fraction(_integer_root(int(scaled), power)) * Fraction(2) ** (exponent - _DIGITS)


def as_float(number: Fraction) -> float:
    """Return the nearest float, `inf` beyond the range."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _integer_root(number: int, power: int) -> int:
    """Return the largest integer whose power is at most `number` (Newton's method, from above)."""
    if power == 2:
        return math.isqrt(number)
    guess = 1 << -(-number.bit_length() // power)
    while True:
        better = ((power - 1) * guess + number // guess ** (power - 1)) // power
        if better >= guess:
            return guess
        guess = better


def _power_sum(arrays: Sequence[Stored], order: Order) -> Fraction:
    """Return the exact sum of powers; for `inf` and `-inf` the exact square of the largest or smallest magnitude."""
    if order.extreme:
        squares = (exact.extreme_square(piece, order.p) for piece in _pieces(arrays, order))
        return (max if order.p > 0 else min)(squares, default=Fraction(0))
    if order.p > 2:
        powers = PowerSum(int(order.p))
        powers.add(_wide_chunks(arrays, order))
        return powers.total()
    total = Fraction(0)
    for piece in _pieces(arrays, order):
        of_piece = exact.power_sum(HOST, viewed_arrays([piece]), order.p, patient=True)
        assert isinstance(of_piece, Fraction)
        total += of_piece
    return total


def _above_in_pairs(arrays: Sequence[Stored], power: int, max_norm: Fraction) -> tuple[float, float] | None:
    """Return the same from sums in pairs of numbers; None if their error may matter."""
    beyond = excess_of_powers(_wide_chunks(arrays, Order(float(power))), power, max_norm)
    unit = Fraction(2) ** (math.frexp(max_norm)[1] * power)
    if beyond is None or not max_norm or abs(beyond) * unit <= max_norm**power * _PAIRS_ENOUGH:
        return None
    return _norm_and_excess(beyond * unit + max_norm**power, power, max_norm)


def _wide_chunks(arrays: Sequence[Stored], order: Order) -> Iterator[np.ndarray]:
    return chain.from_iterable(map(wide_chunks, _pieces(arrays, order)))


def _pieces(arrays: Sequence[Stored], order: Order) -> Iterator[HostArray]:
    """Yield the pieces with elements. Raises `ChangedError` if one is not finite: exact sums would not end."""
    gauge = Gauge(order)
    for x in arrays:
        for piece in x.pieces():
            if piece.size:
                if not math.isfinite(gauge.norm(piece).value):
                    raise ChangedError(f"{x.name} has changed while it was read. Read it again.")
                yield piece
