"""Clip many layers at once, each by its own norm: one kernel call measures them all, and one scales them.

A layer is settled if its norm is finite, lost nothing to underflow, and is far enough from its threshold that the error
bound decides which is larger. Each settled layer then meets the same bound as a single norm with its coefficient. The
other layers, usually few or none, are clipped one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from gradclip.backends.host.protocol import HostBackend
from gradclip.backends.sums import ENOUGH, kernels_sum_error
from gradclip.core.arrays import Arrays
from gradclip.core.coefficient import coefficient, needs_split, open_between
from gradclip.core.formats import FLOAT64, format_of
from gradclip.core.norms import Norm, Order, Partial, relative_error, rooted
from gradclip.core.records import Coefficient

if TYPE_CHECKING:
    from gradclip.native._kernels import Arrays as KernelArrays


@dataclass(frozen=True)
class _Known:
    """The leaves of layers, in order, as the kernels know them."""

    sources: Sequence[Any]
    kernels: "KernelArrays"
    arrays: Arrays  # answers questions about their dtypes
    results: Callable[[], tuple[list[Any], Any]]  # arrays for results, and the same as the kernels know them, or None
    leave: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]  # converts results to the framework's own


@dataclass(frozen=True)
class Layers:
    """Layers in host memory with known sums of powers: their numbers, their leaves and their norms."""

    backend: HostBackend
    numbers: list[int]
    members: list[int]
    group_of: list[int]
    known: _Known
    norm: Norm
    settled: np.ndarray
    wide: np.ndarray  # whether a leaf of the layer has float64 precision

    def clipped(self, max_norms: Sequence[float]) -> "tuple[Layers, list[Any]] | None":
        """Return the layers settled for these thresholds, and all leaves scaled; None if that is impossible."""
        results, targets = self.known.results()
        return None if targets is None else (self.scaled(max_norms, targets), results)

    def scaled(self, max_norms: Sequence[float], to: "KernelArrays") -> "Layers":
        """Write all leaves to `to`, scaling the layers settled for these thresholds; return the settled layers."""
        thresholds = np.array([max_norms[number] for number in self.numbers])
        split = needs_split(self.backend, self.known.arrays)
        chosen = coefficient(self.backend, self.norm, thresholds, split=split)
        settled = self.settled & ~open_between(self.norm, thresholds)
        keep = (chosen.keep | ~settled).tolist()
        self.known.kernels.scale_groups(to, self.group_of, keep, factors_of_groups(chosen), self.backend.threads())
        return replace(self, settled=settled)

    def norms(self, leaves: Sequence[Any]) -> dict[int, Any]:
        """Return the norm of each settled layer by its number, as a scalar of the framework."""
        found: dict[int, Any] = {}
        inside = self._inside(leaves)
        for dtype, alike in (("float64", self.wide & self.settled), ("float32", ~self.wide & self.settled)):
            at = np.flatnonzero(alike).tolist()
            norms = self.backend.leave_scalars(self.norm.value[alike], dtype, [inside[i] for i in at]) if at else []
            found.update(zip([self.numbers[i] for i in at], norms, strict=True))
        return found

    def results(self, made: Sequence[Any], leaves: Sequence[Any]) -> dict[int, Any]:
        """Return the clipped leaves of settled layers by their indices, as arrays of the framework."""
        if self.settled.all():
            indices, results = self.members, made
        else:
            settled = [(i, y) for i, g, y in zip(self.members, self.group_of, made, strict=True) if self.settled[g]]
            indices, results = [i for i, _ in settled], [y for _, y in settled]
        return dict(zip(indices, self.known.leave(results, [leaves[i] for i in indices]), strict=True))

    def _inside(self, leaves: Sequence[Any]) -> list[Sequence[Any]]:
        """Return the leaves of each layer; all leaves for a layer without any."""
        inside: list[list[Any]] = [[] for _ in self.numbers]
        for member, group in zip(self.members, self.group_of, strict=True):
            inside[group].append(leaves[member])
        return [layer or leaves for layer in inside]


def measured(
    backend: HostBackend, leaves: Sequence[Any], groups: Sequence[Sequence[int]], order: Order
) -> Layers | None:
    """Measure the groups of indices whose leaves the kernels all know; return None if there are none."""
    if order.p not in (1, 2):
        return None
    numbers, members = list(range(len(groups))), list(chain.from_iterable(groups))
    known = _as_they_are(backend, [leaves[index] for index in members])
    if known is None:
        prepared = list(map(backend.prepare, leaves))
        unknown = set(backend.enter(prepared).left_out)
        numbers = [number for number in numbers if not unknown.intersection(groups[number])]
        members = [index for number in numbers for index in groups[number]]
        known = _prepared(backend, [prepared[index] for index in members])
    if known is None:
        return None
    group_of = np.repeat(np.arange(len(numbers)), [len(groups[number]) for number in numbers])
    found = known.kernels.group_sums(
        group_of.tolist(), len(numbers), order.p, known.arrays.only_halves, backend.threads()
    )
    sums = np.array(found)
    settled = np.isfinite(sums) & (sums > (ENOUGH if FLOAT64 in known.arrays.formats else -1.0))
    elements = np.bincount(group_of, known.kernels.counts, len(numbers))
    counts, of_count = np.unique(elements.astype(np.int64), return_inverse=True)
    bounds = [kernels_sum_error(count, known.arrays, order.p) for count in counts.tolist()]
    error: Any = np.array([relative_error(order, bound, FLOAT64, exact=False) for bound in bounds])[of_count]
    norm = Norm(rooted(backend, Partial(sums, None), order), None, error, 0.0)
    wide = np.full(len(numbers), known.arrays.formats == {FLOAT64})
    if len(known.arrays.formats) > 1:
        wide[group_of[[format_of(source) is FLOAT64 for source in known.sources]]] = True
    return Layers(backend, numbers, members, group_of.tolist(), known, norm, settled, wide)


def _as_they_are(backend: HostBackend, leaves: Sequence[Any]) -> _Known | None:
    """Return leaves that the kernels know and write in memory order; None if they need preparation."""
    kernels = backend.known(leaves)
    if kernels is None or not kernels.in_order:
        return None

    def results() -> tuple[list[Any], Any]:
        new = backend.new_like(leaves, copied=False)
        return new, backend.known(new)

    return _Known(leaves, kernels, Arrays((), kernels.dtypes), results, lambda results, _: results)


def _prepared(backend: HostBackend, prepared: Sequence[Any]) -> _Known | None:
    arrays = backend.enter(prepared)
    if not arrays or arrays.others:
        return None
    return _Known(prepared, arrays.kernels, arrays, partial(backend.places_for, arrays), backend.leave_all)


def factors_of_groups(chosen: Coefficient) -> list[list[float]]:
    """Return the two factors of wide formats, then the two of narrow formats."""
    ones = np.ones(chosen.keep.shape)
    pairs: list[tuple[Any, Any]] = [(factors.first, factors.second) for factors in (chosen.wide, chosen.narrow)]
    return [(ones if factor is None else ones * factor).tolist() for pair in pairs for factor in pair]
