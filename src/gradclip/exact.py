"""Whether a norm is at most the threshold, decided in exact arithmetic.

Asked only where the computed norm is within its error bound of the threshold, as for the gradient (3, 4) and the
threshold 5. `math.fsum` returns the correctly rounded sum of its terms, so the sign of a sum of exact terms is
exact. The square of a number with at most 26 significant bits is a float64; a float64 is first cut into two such
halves (Dekker, "A floating-point technique for extending the available precision", 1971).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

_MOST_FRACTIONS = 100_000
_LARGEST_POWER = 64
_SMALLEST, _LARGEST = 2.0**-400, 2.0**400


def at_most(chunks: Callable[[], Iterable[np.ndarray]], count: int, p: float, max_norm: float) -> bool:
    """Say whether the norm of order `p` of the float64 `chunks()` (1-D, `count` elements in all) is <= `max_norm`.

    False also where that cannot be told, which clips: a `p` that is no integer, or too many elements for it.
    """
    if p == 1:
        magnitudes = (np.abs(chunk).tolist() for chunk in chunks())
        return math.fsum(_chained(magnitudes, [-max_norm])) <= 0
    if p == 2 and _SMALLEST < max_norm < _LARGEST:
        threshold = [-t for t in _exact_squares(np.array([max_norm]))]
        try:
            return math.fsum(_chained(map(_exact_squares, chunks()), threshold)) <= 0
        except _UnsafeError:
            pass
    if count > _MOST_FRACTIONS:
        return False
    return _powers_at_most([abs(v) for chunk in chunks() for v in chunk.tolist() if v], p, max_norm)


def _powers_at_most(magnitudes: list[float], p: float, max_norm: float) -> bool:
    if len(magnitudes) == 1:
        return magnitudes[0] <= max_norm
    if not p.is_integer() or p > _LARGEST_POWER:
        return False
    power = int(p)
    return sum(Fraction(v) ** power for v in magnitudes) <= Fraction(max_norm) ** power


class _UnsafeError(Exception):
    """An element whose exact square does not fit float64's range."""


def _exact_squares(x: np.ndarray) -> list[float]:
    """Return float64 terms whose exact sum is the sum of the squares of `x`."""
    magnitude = np.abs(x[x != 0])
    if magnitude.size and (magnitude.min() <= _SMALLEST or magnitude.max() >= _LARGEST):
        raise _UnsafeError
    high = (magnitude.view(np.int64) & -(1 << 27)).view(np.float64)
    low = magnitude - high
    terms = [high * high]
    if low.any():
        terms += [2.0 * high * low, *_exact_low_squares(low)]
    return np.concatenate(terms).tolist()


def _exact_low_squares(low: np.ndarray) -> Sequence[np.ndarray]:
    """Square numbers of up to 27 significant bits: cut the last bit off, so that each product has at most 53."""
    head = (low.view(np.int64) & -(1 << 27)).view(np.float64)
    tail = low - head
    return head * head, 2.0 * head * tail, tail * tail


def _chained(lists: Iterable[list[float]], last: list[float]) -> Iterator[Any]:
    for terms in lists:
        yield from terms
    yield from last
