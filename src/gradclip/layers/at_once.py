"""Many layers at once, each with its own norm: one call of the kernels measures them all, and one scales them.

A layer is settled where its norm is finite, lost nothing to underflow, and is not so close to its threshold that its
error leaves open which is larger. What holds for one norm and its coefficient holds for each of them then. The
others, few if any, are left to be clipped one by one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradclip.backends.formats import FLOAT64, format_of
from gradclip.backends.host.arrays import HostArrays
from gradclip.backends.protocols import HostBackend
from gradclip.backends.sums import ENOUGH, kernels_sum_error
from gradclip.core.coefficient import Coefficient, coefficient, needs_split, open_between
from gradclip.core.norms import Norm, Order, Partial, relative_error, rooted


@dataclass(frozen=True)
class Layers:
    """Layers in host memory whose sums of powers are known: their numbers, the leaves in them, their norms."""

    backend: HostBackend
    numbers: list[int]
    members: list[int]
    group_of: list[int]
    arrays: HostArrays
    norm: Norm
    settled: np.ndarray
    wide: np.ndarray  # whether a leaf of the layer has float64 precision

    def clipped(self, max_norms: Sequence[float]) -> "tuple[Layers, list[Any]] | None":
        """Return those that are settled beside their thresholds, and all leaves scaled; None where they cannot be."""
        thresholds = np.array([max_norms[number] for number in self.numbers])
        chosen = coefficient(self.backend, self.norm, thresholds, split=needs_split(self.backend, self.arrays))
        settled = self.settled & ~open_between(self.norm, thresholds)
        results, targets = self.backend.places_for(self.arrays)
        if targets is None:
            return None
        keep = (chosen.keep | ~settled).tolist()
        self.arrays.kernels.scale_groups(targets, self.group_of, keep, _factors(chosen), self.backend.threads())
        return replace(self, settled=settled), results

    def norms(self, leaves: Sequence[Any]) -> dict[int, Any]:
        """Return the norm of each settled layer by its number, as a scalar of the framework."""
        found: dict[int, Any] = {}
        inside: dict[int, list[Any]] = {}
        for member, group in zip(self.members, self.group_of, strict=True):
            inside.setdefault(group, []).append(leaves[member])
        for dtype, alike in (("float64", self.wide & self.settled), ("float32", ~self.wide & self.settled)):
            at = np.flatnonzero(alike).tolist()
            near = [inside.get(i, leaves) for i in at]
            norms = self.backend.leave_scalars(self.norm.value[alike], dtype, near) if at else []
            found.update(zip([self.numbers[i] for i in at], norms, strict=True))
        return found


def measured(
    backend: HostBackend, prepared: Sequence[Any], groups: Sequence[Sequence[int]], order: Order
) -> Layers | None:
    """Return those of the groups of indices all of whose leaves the kernels know; None without any."""
    if order.p not in (1, 2):
        return None
    arrays = backend.enter(prepared)
    unknown = set(arrays.left_out)
    numbers = [number for number, group in enumerate(groups) if not unknown.intersection(group)]
    members = [index for number in numbers for index in groups[number]]
    if members != list(range(len(prepared))):
        arrays = backend.enter([prepared[index] for index in members])
    if not arrays or arrays.others:
        return None
    sizes = [len(groups[number]) for number in numbers]
    group_of = np.repeat(np.arange(len(numbers)), sizes)
    in_float = arrays.only_halves
    found = arrays.kernels.group_sums(group_of.tolist(), len(numbers), order.p, in_float, backend.threads())
    sums = np.array(found)
    settled = np.isfinite(sums) & (sums > (ENOUGH if FLOAT64 in arrays.formats else -1.0))
    elements = np.bincount(group_of, [math.prod(prepared[index].shape) for index in members], len(numbers))
    counts, of_count = np.unique(elements.astype(np.int64), return_inverse=True)
    bounds = [kernels_sum_error(count, arrays, order.p) for count in counts.tolist()]
    error: Any = np.array([relative_error(order, bound, FLOAT64, exact=False) for bound in bounds])[of_count]
    norm = Norm(rooted(backend, Partial(sums, None), order), None, error, 0.0)
    wide = np.full(len(numbers), arrays.formats == {FLOAT64})
    if len(arrays.formats) > 1:
        wide[group_of[[format_of(prepared[index]) is FLOAT64 for index in members]]] = True
    return Layers(backend, numbers, members, group_of.tolist(), arrays, norm, settled, wide)


def _factors(chosen: Coefficient) -> list[list[float]]:
    """Return the two factors of wide formats, and those of narrow ones."""
    ones = np.ones(chosen.keep.shape)
    pairs: list[tuple[Any, Any]] = [(factors.first, factors.second) for factors in (chosen.wide, chosen.narrow)]
    return [(ones if factor is None else ones * factor).tolist() for pair in pairs for factor in pair]
