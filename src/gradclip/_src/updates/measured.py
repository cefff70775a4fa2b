"""The first look at arrays: their norms and what is not finite, piece by piece, each piece read once."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gradclip._src.backends.host.arrays import HostArray, viewed_arrays
from gradclip._src.backends.host.backend import HOST
from gradclip._src.backends.sums import ENOUGH, kernels_norm_error
from gradclip._src.core import accumulators
from gradclip._src.core.formats import BFLOAT16, FLOAT16, SUPPORTED, is_empty_name, is_integer_name
from gradclip._src.core.norms import Norm, Order
from gradclip._src.updates.files.stored import FileError, Stored
from gradclip._src.updates.verdict import in_one_line, shown

_AT_ONCE = 4096
"""Norms of pieces that are added up together. One by one, that would take longer than measuring a piece."""


@dataclass(frozen=True)
class Reading:
    """What one look at the arrays that count has found.

    Attributes:
        whole: the norm of all.
        shares: of each array, the share of norm**p that it holds. For `inf` and `-inf`, one array has 1, the others 0.
        value: the norm as a float: NaN or infinite as the elements are; NaN if an array cannot be read.
        elements: how many numbers they hold.
        nonfinite: for each array with NaN or infinity, its name and how many.
        unreadable: for each array that cannot be read, its name and why.
    """

    whole: Norm
    shares: list[float]
    value: float
    elements: int
    nonfinite: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    @property
    def finite(self) -> bool:
        """Whether all arrays were read, and all elements are finite."""
        return not (self.nonfinite or self.unreadable)


def counts(dtype: str) -> bool:
    """Say whether arrays with this dtype count: their pieces are numbers of a dtype that norms support."""
    return dtype in SUPPORTED or dtype.startswith("float8_")


def left_out(dtype: str) -> bool:
    """Say whether arrays with this dtype are left out of norms: they hold integers, or nothing."""
    return is_integer_name(dtype) or is_empty_name(dtype)


def measured(arrays: Sequence[Stored], order: Order) -> Reading:
    """Measure arrays whose dtype `counts`, reading each once."""
    totals, gauge = _Totals(order, len(arrays)), Gauge(order, {x.dtype for x in arrays})
    nonfinite, unreadable, any_nan, elements = [], [], False, 0
    for place, x in enumerate(arrays):
        nans = infinities = 0
        try:
            for piece in x.pieces():
                norm = gauge.norm(piece)
                elements += piece.size
                if not math.isfinite(norm.value):
                    of_piece = HOST.count_nonfinite(piece)
                    nans, infinities = nans + of_piece[0], infinities + of_piece[1]
                elif piece.size:
                    totals.add(place, norm)
        except Exception as error:  # whatever a file or an object of an update may raise
            unreadable.append(reading_failed(x, error))
        if nans or infinities:
            any_nan = any_nan or nans > 0
            nonfinite.append(
                f"{shown(x.name)} holds {nans:,} NaN and {infinities:,} infinite of its {_size(x)} numbers"
            )
    whole, shares = totals.norms()
    value = float(whole.product())
    if nonfinite or unreadable:
        value = math.nan if any_nan or unreadable else math.inf
    return Reading(whole, shares, value, elements, nonfinite, unreadable)


class Gauge:
    """Measures one piece after the other, which may be new numbers in the same memory.

    Only if all arrays are of half types, their squares are added in float32, as in other norms.
    """

    def __init__(self, order: Order, dtypes: Set[str] = frozenset()) -> None:
        self._order, self._threads = order, HOST.threads()
        self._halves = bool(dtypes) and dtypes <= {FLOAT16.name, BFLOAT16.name}
        self._piece: HostArray | None = None
        self._arrays: Any = None
        self._quick = False

    def _norm_of(self, total: float, size: int) -> Norm:
        root = math.sqrt(total) if self._order.p == 2 else total
        return Norm(root, None, kernels_norm_error(size, self._order.p, self._halves), 0.0)

    def norm(self, piece: HostArray) -> Norm:
        """Return the norm of a piece. Its value is finite exactly if all elements are."""
        if piece is not self._piece:
            arrays = viewed_arrays([piece])
            self._piece, self._arrays = piece, arrays if self._halves else arrays.as_precise_as(["float64"])
            self._quick = self._order.p in (1, 2) and bool(self._arrays.kernels) and not self._arrays.others
        if self._quick:
            total = self._arrays.kernels.sum(self._order.p, 1.0, self._halves, self._threads)[0]
            if ENOUGH < total < math.inf:
                return self._norm_of(total, piece.size)
        return HOST.norms(self._arrays, self._order)


def reading_failed(x: Stored, error: Exception) -> str:
    """Say that an array could not be read. A file's own error already names the file."""
    said = in_one_line(error)
    return said if isinstance(error, FileError) else f"{shown(x.name)} cannot be read: {said}"


def _size(x: Stored) -> str:
    return f"{math.prod(x.shape):,}"


class _Totals:
    """The accumulators of each array (see `core.accumulators`), filled with the norms of pieces."""

    def __init__(self, order: Order, arrays: int) -> None:
        self._order, self._pieces, self._floor = order, 0, 0.0
        self._sums = np.zeros((accumulators.length(order), max(1, arrays)))
        if order.p < 0:
            self._sums[0] = -math.inf
        self._places: list[int] = []
        self._norms: list[tuple[float, float, float]] = []

    def add(self, place: int, norm: Norm) -> None:
        """Add the norm of a piece to the array at `place`."""
        self._places.append(place)
        self._norms.append((float(norm.value), 1.0 if norm.divisor is None else float(norm.divisor), norm.error))
        self._floor += norm.floor
        self._pieces += 1
        if len(self._places) == _AT_ONCE:
            self._put()

    def norms(self) -> tuple[Norm, list[float]]:
        """Return the norm of all arrays, and each one's share of norm**p."""
        self._put()
        combined = (np.max if self._order.extreme else np.sum)(self._sums, axis=1)
        pieces = max(1, self._pieces)
        whole = accumulators.norm_of(HOST, list(combined), self._order, pieces)
        each = accumulators.norm_of(HOST, list(self._sums), self._order, pieces)
        if self._order.extreme:
            best = int(np.argmax(self._sums[0]))
            return replace(whole, floor=self._floor), [float(place == best) for place in range(self._sums.shape[1])]
        return replace(whole, floor=self._floor), _shares(whole, each, self._order)

    def _put(self) -> None:
        if not self._places:
            return
        values, divisors, errors = np.array(self._norms).T
        # A value that needs no divisor is itself the magnitude, so it takes the divisor's place.
        plain = divisors == 1.0
        pieces = Norm(np.where(plain, 1.0, values), np.where(plain, values, divisors), errors, 0.0)
        filled = accumulators.filled(HOST.xp, pieces, self._order)
        add = np.maximum.at if self._order.extreme else np.add.at
        for row, terms in zip(self._sums, filled, strict=True):
            add(row, self._places, np.asarray(terms))
        self._places.clear()
        self._norms.clear()


def _shares(whole: Norm, each: Norm, order: Order) -> list[float]:
    if not whole.value:
        return [0.0] * len(each.value)
    ratio = (each.value / whole.value) * (each.divisor / whole.divisor)
    return [float(share) for share in ratio**order.p]
