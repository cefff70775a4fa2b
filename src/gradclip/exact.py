"""Whether a norm is at most the threshold, decided in exact arithmetic; and exact distances.

Asked only where the computed norm is within its error bound of the threshold, as for the gradient (3, 4) and the
threshold 5. `math.fsum` returns the correctly rounded sum of its terms, so the sign of a sum of exact terms is
exact. The square of a number with at most 26 significant bits is a float64; a float64 is first cut into two such
halves (Dekker, "A floating-point technique for extending the available precision", 1971).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np

_MOST_FRACTIONS = 100_000
_LARGEST_POWER = 64
_SMALLEST, _LARGEST = 2.0**-400, 2.0**400
_CONDENSED_ERROR = 2.0**-70


def chunks_of(backend: Any, arrays: Sequence[Any]) -> tuple[Callable[[], Iterator[np.ndarray]], int]:
    """Return what yields the real numbers of arrays in host memory as float64 pieces, and how many there are."""
    parts = [part for x in arrays for part in backend.parts(x)]
    return lambda: chain.from_iterable(map(backend.wide_chunks, parts)), sum(math.prod(x.shape) for x in parts)


def at_most(chunks: Callable[[], Iterable[np.ndarray]], count: int, p: float, max_norm: float) -> bool:
    """Say whether the norm of order `p` of the float64 `chunks()` (1-D, `count` elements in all) is <= `max_norm`.

    False also where that cannot be told, which clips: a `p` that is no integer, or too many elements for it.
    """
    try:
        if p == 1:
            return _sum_at_most(lambda: map(np.abs, chunks()), [max_norm])
        if p == 2 and _SMALLEST < max_norm < _LARGEST:
            return _sum_at_most(lambda: map(_exact_squares, chunks()), _exact_squares(np.array([max_norm])).tolist())
    except (_UnsafeError, OverflowError):
        pass
    if count > _MOST_FRACTIONS:
        return False
    return _powers_at_most([abs(v) for chunk in chunks() for v in chunk.tolist() if v], p, max_norm)


def _sum_at_most(terms: Callable[[], Iterable[np.ndarray]], limit: list[float]) -> bool:
    """Say whether the sum of non-negative terms is at most that of `limit`: fast if they differ, exactly if not."""
    negative = [-term for term in limit]
    pairs = [_condensed(chunk) for chunk in terms()]
    difference = math.fsum([*(number for pair in pairs for number in pair), *negative])
    if abs(difference) > _CONDENSED_ERROR * math.fsum(limit):
        return difference < 0
    return math.fsum(chain((term for chunk in terms() for term in chunk.tolist()), negative)) <= 0


def _condensed(terms: np.ndarray) -> tuple[float, float]:
    """Return two numbers that add up to the sum of at most 2**20 terms, but for a relative error below 2**-80.

    Terms are added in pairs, and the rounding error of each addition, found exactly (Knuth's TwoSum), is added up
    apart. Over 20 levels these errors are at most 20 * 2**-53 of the sum, and adding up 2**20 of them errs by
    at most 2**20 * 2**-53 of that.
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


def _powers_at_most(magnitudes: list[float], p: float, max_norm: float) -> bool:
    if len(magnitudes) == 1:
        return magnitudes[0] <= max_norm
    if not p.is_integer() or p > _LARGEST_POWER:
        return False
    return _power_sum(magnitudes, int(p)) <= Fraction(max_norm) ** int(p)


def power_sum(chunks: Callable[[], Iterable[np.ndarray]], count: int, p: float) -> Fraction | float:
    """Return the exact sum of the powers |v|**p of the `count` numbers in `chunks()`; NaN where that cannot be told."""
    if count > _MOST_FRACTIONS or not p.is_integer():
        return math.nan
    return _power_sum((abs(v) for chunk in chunks() for v in chunk.tolist()), int(p))


def _power_sum(magnitudes: Iterable[float], power: int) -> Fraction:
    return sum((Fraction(v) ** power for v in magnitudes), Fraction(0))


class _UnsafeError(Exception):
    """An element whose exact square does not fit float64's range."""


def _exact_squares(x: np.ndarray) -> np.ndarray:
    """Return float64 terms whose exact sum is the sum of the squares of `x`."""
    magnitude = np.abs(x[x != 0])
    if magnitude.size and (magnitude.min() <= _SMALLEST or magnitude.max() >= _LARGEST):
        raise _UnsafeError
    high = (magnitude.view(np.int64) & -(1 << 27)).view(np.float64)
    low = magnitude - high
    terms = [high * high]
    if low.any():
        terms += [2.0 * high * low, *_exact_low_squares(low)]
    return np.concatenate(terms)


def _exact_low_squares(low: np.ndarray) -> Sequence[np.ndarray]:
    """Square numbers of up to 27 significant bits: cut the last bit off, so that each product has at most 53."""
    head = (low.view(np.int64) & -(1 << 27)).view(np.float64)
    tail = low - head
    return head * head, 2.0 * head * tail, tail * tail


def squared_distance(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> Fraction:
    """Return the sum of the squares of all differences, exactly. The arrays hold finite float64 numbers or integers."""
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
    """Return float64 numbers, none of them with an exponent below this one, as integers of any size."""
    mantissa, exponents = np.frexp(x)
    shifts = np.where(x == 0, 0, exponents - exponent)
    return (mantissa * 2.0**53).astype(np.int64).astype(object) << shifts.astype(object)
