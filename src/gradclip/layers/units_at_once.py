"""Clip the units of many leaves at once: one kernel call measures them all, and one scales them in place.

To the kernels a unit is a contiguous row of its leaf. Leaves with another layout are copied so that their units are
rows; large leaves are not copied. A leaf is settled if all its units are, as layers are in `at_once`. The other leaves,
usually few or none, are clipped one by one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradclip.backends.host.arrays import HostArrays
from gradclip.backends.host.protocol import HostBackend
from gradclip.backends.sums import ENOUGH, examples_sum_error
from gradclip.core.arrays import Arrays
from gradclip.core.coefficient import coefficient, open_between
from gradclip.core.formats import FLOAT64, format_of
from gradclip.core.norms import Norm, Order, Partial, norm_dtype, relative_error, rooted
from gradclip.core.records import Coefficient, Factors
from gradclip.core.scopes import Scope
from gradclip.native import describe_buffers

if TYPE_CHECKING:
    from gradclip.core.units import Adaptive
    from gradclip.native._kernels import Arrays as KernelArrays

_COPIED = 1 << 16  # leaves up to this many elements are copied; the copy stays in cache


@dataclass(frozen=True)
class Following:
    """Thresholds that follow the norms of the units of parameters, one parameter for each leaf."""

    adaptive: "Adaptive"
    params: Arrays


class _Layout(NamedTuple):
    """The own axes of a leaf's units, the shape of their norms, the number of units, and the elements in each."""

    own: tuple[int, ...]
    norms_shape: tuple[int, ...]
    units: int
    elements: int


# Cached: many leaves have the same shape, and this takes longer than measuring a small leaf.
@lru_cache(maxsize=256)
def _layout(scope: Scope, shape: tuple[int, ...]) -> _Layout:
    of_norms = scope.norms_shape(shape)
    return _Layout(scope.own_axes(len(shape)), of_norms, math.prod(of_norms), scope.elements(shape))


class _Laid(NamedTuple):
    """The leaves whose units are rows to the kernels; for copied leaves, the view copied from and the copy."""

    kernels: "KernelArrays"
    numbers: Sequence[int]
    copies: dict[int, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class _Measured:
    """The norms of all units of all leaves, as a vector; `known` selects the leaves that the kernels know."""

    laid: _Laid
    counts: Sequence[int]
    known: Any
    leaf_of: np.ndarray
    norm: Norm
    settled: np.ndarray


@dataclass(frozen=True)
class Decided:
    """What happens to the leaves; units are identified by their places in a vector."""

    backend: HostBackend
    arrays: Arrays
    layouts: Sequence[_Layout]
    measured: _Measured
    coefficient: Coefficient
    settled: np.ndarray  # one flag per leaf

    def scale(self) -> list[int]:
        """Scale the settled leaves in place; return the indices of those that were written."""
        at, chosen = self.measured, self.coefficient
        keep = chosen.keep | ~self.settled[at.leaf_of]
        written = np.flatnonzero(np.bincount(at.leaf_of[~keep])).tolist()
        if not written:
            return []
        table = np.ones((5, len(keep)))
        for line, values in enumerate((keep, *_pair(chosen.wide), *_pair(chosen.narrow))):
            table[line] = values
        lines = describe_buffers([np.ascontiguousarray(table[:, at.known])]).kernels
        at.laid.kernels.scale_rows(at.counts, lines, self.backend.threads())
        for rows, copy in [at.laid.copies[number] for number in written if number in at.laid.copies]:
            rows[...] = copy
        return written

    def norms(self, leaves: Sequence[Any]) -> dict[int, Any]:
        """Return the norms of the units of each settled leaf, as arrays of the framework."""
        numbers = np.flatnonzero(self.settled).tolist()
        ends = list(accumulate(layout.units for layout in self.layouts))
        values = [
            self.measured.norm.value[end - layout.units : end].reshape(layout.norms_shape)
            for end, layout in zip(ends, self.layouts, strict=True)
        ]
        found: dict[int, Any] = {}
        for dtype, alike in self._by_dtype(numbers).items():
            made = self.backend.leave_vectors([values[i] for i in alike], dtype, [leaves[i] for i in alike])
            found.update(zip(alike, made, strict=True))
        return found

    def _by_dtype(self, numbers: Sequence[int]) -> dict[str, list[int]]:
        """Return which of the leaves have norms of each dtype."""
        if len(self.arrays.formats) < 2:
            return {norm_dtype(self.arrays): list(numbers)} if numbers else {}
        found: dict[str, list[int]] = {}
        for number in numbers:
            found.setdefault("float64" if format_of(self.arrays[number]) is FLOAT64 else "float32", []).append(number)
        return found


def decided(
    backend: HostBackend,
    arrays: Arrays,
    shapes: Sequence[tuple[int, ...]],
    scopes: Sequence[Scope],
    order: Order,
    thresholds: Sequence[float] | Following,
) -> Decided | None:
    """Measure the units of leaves of these shapes, and decide what happens to them; None if the kernels cannot.

    Thresholds are one number for each leaf, or a `Following`.
    """
    layouts = list(map(_layout, scopes, shapes))
    units = _measured(backend, arrays, layouts, order)
    if units is None:
        return None
    settled = units.settled
    if isinstance(thresholds, Following):
        beside = _measured(backend, thresholds.params, layouts, order)
        if beside is None:
            return None
        settled = settled & beside.settled
        max_norms = np.asarray(thresholds.adaptive.of_norm(backend, beside.norm, thresholds.params, ()))
    else:
        max_norms = np.array(thresholds, float)[units.leaf_of]
    chosen = coefficient(backend, units.norm, max_norms, split=FLOAT64 in arrays.formats)
    settled = settled & ~np.asarray(open_between(units.norm, max_norms))
    of_leaves = np.bincount(units.leaf_of[~settled], minlength=len(shapes)) == 0
    return Decided(backend, arrays, layouts, units, chosen, of_leaves)


def _measured(backend: HostBackend, arrays: Arrays, layouts: Sequence[_Layout], order: Order) -> _Measured | None:
    laid = _laid(arrays, layouts) if order.p in (1, 2) else None
    if laid is None:
        return None
    leaf_of = np.repeat(np.arange(len(layouts)), [layout.units for layout in layouts])
    counts = [layouts[number].units for number in laid.numbers]
    known: Any = slice(None) if len(counts) == len(layouts) else np.flatnonzero(np.isin(leaf_of, laid.numbers))

    def sums_of(p: float) -> np.ndarray:
        sums, of_known = np.full(len(leaf_of), np.nan), np.empty(sum(counts))
        laid.kernels.sum_rows(counts, p, describe_buffers([of_known]).kernels, backend.threads())
        sums[known] = of_known
        return sums

    sums = sums_of(order.p)
    settled = np.isfinite(sums)
    if FLOAT64 in arrays.formats:
        # Squares may underflow, magnitudes do not: if their sum is 0, all elements are zero.
        settled &= (sums > ENOUGH) | (sums_of(1.0) == 0) if (sums == 0).any() else sums > ENOUGH
    norm = Norm(rooted(backend, Partial(sums, None), order), None, _errors(layouts, order)[leaf_of], 0.0)
    return _Measured(laid, counts, known, leaf_of, norm, settled)


def _errors(layouts: Sequence[_Layout], order: Order) -> Any:
    """Return bounds on the relative errors of the norms of each leaf's units."""
    # Squares of half types are also added in float64.
    sums = {count: examples_sum_error(count) for count in {layout.elements for layout in layouts}}
    errors = {count: relative_error(order, error, FLOAT64, exact=False) for count, error in sums.items()}
    return np.array([errors[layout.elements] for layout in layouts])


def _laid(arrays: Arrays, layouts: Sequence[_Layout]) -> _Laid | None:
    """Return the units as rows; None without kernels."""
    numbers = list(range(len(layouts)))
    first = all(layout.own == tuple(range(len(layout.own))) for layout in layouts)
    if first and isinstance(arrays, HostArrays) and arrays.kernels and not arrays.left_out and arrays.kernels.in_order:
        return _Laid(arrays.kernels, numbers, {})  # creating a view of each leaf would take long
    rows = [_rows(x.data, layout.own) for x, layout in zip(arrays, layouts, strict=True)]
    numbers = [number for number in numbers if rows[number].flags.c_contiguous or rows[number].size <= _COPIED]
    copies = {i: (rows[i], np.ascontiguousarray(rows[i])) for i in numbers if not rows[i].flags.c_contiguous}
    described = describe_buffers([copies[i][1] if i in copies else rows[i] for i in numbers])
    if not described.kernels:
        return None
    left_out = {numbers[place] for place in described.left_out}
    return _Laid(described.kernels, [number for number in numbers if number not in left_out], copies)


def _pair(factors: Factors) -> tuple[Any, Any]:
    return factors.first, 1.0 if factors.second is None else factors.second


def _rows(data: np.ndarray, own: tuple[int, ...]) -> np.ndarray:
    """Return a view with the own axes first and the other axes in memory order."""
    others = [axis for axis in range(data.ndim) if axis not in own]
    return data.transpose(*own, *sorted(others, key=lambda axis: -data.strides[axis]))


def entered_copies(backend: HostBackend, leaves: Sequence[Any]) -> tuple[list[Any], Arrays]:
    """Return writable copies of the leaves, and the same as arrays."""
    copies = backend.copies(backend.enter(list(map(backend.prepare, leaves))))
    return copies, backend.entered_copies(copies)
