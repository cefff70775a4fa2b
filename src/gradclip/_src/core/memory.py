"""Gradients in memory: which of them share elements, wholly or in part."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

# Finding out whether two strided arrays overlap can take exponential time. NumPy gives up after this many attempts.
_MOST_WORK: Any = 1_000_000  # NumPy's stubs allow only two special values

_Axes = tuple[tuple[int, int], ...]
_Placed = tuple[int, _Axes, "Region"]


@dataclass(frozen=True)
class Region:
    """A set of elements in memory. Views of the same elements are equal, whatever their shapes.

    `axes` holds, for each axis, the step in bytes (positive, ascending) and the number of elements, or of runs of
    elements.
    """

    address: int
    itemsize: int
    axes: _Axes

    @classmethod
    def of(cls, address: int, itemsize: int, shape: Sequence[int], strides: Sequence[int]) -> "Region | None":
        """Return the region of an array, strides in bytes. None if it is empty or without memory."""
        if 0 in shape or not address:
            return None
        # With a step of 0, as in an expanded array, several elements share one place.
        used = [(step, count) for count, step in zip(shape, strides, strict=True) if count > 1 and step]
        # With a negative step, the first element does not have the lowest address.
        address += sum(step * (count - 1) for step, count in used if step < 0)
        axes: list[tuple[int, int]] = []
        for step, count in sorted((abs(step), count) for step, count in used):
            # Merge axes without a gap between them, so that views with other shapes compare equal.
            if axes and step == axes[-1][0] * axes[-1][1]:
                axes[-1] = (axes[-1][0], axes[-1][1] * count)
            else:
                axes.append((step, count))
        return cls(address, itemsize, tuple(axes))

    @property
    def places(self) -> int:
        """The number of elements that have a place in memory."""
        return math.prod(count for _, count in self.axes)

    @property
    def end(self) -> int:
        """The address just past the last element."""
        return self.address + _extent(self.axes, self.itemsize)

    def meets(self, other: "Region") -> bool:
        """Say whether two regions overlap. True also if that is too expensive to find out."""
        lowest = min(self.address, other.address)
        try:
            return np.shares_memory(self._above(lowest), other._above(lowest), max_work=_MOST_WORK)
        except np.exceptions.TooHardError:
            return True

    def _above(self, address: int) -> np.ndarray:
        """Return an array that lies as far above address 1 as this one above `address`. It must not be read."""

        # NumPy can tell whether strided arrays overlap. It compares only addresses, never values.
        class ArrayInterface:
            __array_interface__ = {  # noqa: RUF012
                "data": (self.address - address + 1, True),
                "shape": tuple(count for _, count in self.axes),
                "strides": tuple(step for step, _ in self.axes),
                "typestr": f"|V{self.itemsize}",
                "version": 3,
            }

        return np.asarray(ArrayInterface())


def region_of_array(array: np.ndarray) -> Region | None:
    """Return the region of a NumPy array."""
    address, _ = array.__array_interface__["data"]
    return Region.of(address, array.itemsize, array.shape, array.strides)


def any_overlap(stretches: Iterable[tuple[int, int]]) -> bool:
    """Say whether any two stretches of memory (begin, end) overlap."""
    # After sorting by start address, if any two overlap, two neighbours do.
    return any(end > begin for (_, end), (begin, _) in pairwise(sorted(stretches)))


def meeting(regions: Sequence[Region | None]) -> list[list[int]]:
    """Return the indices of the regions that share memory, a list for each set, those with the most elements first.

    A set holds regions that meet directly or through others. Regions that meet no other are in none.
    """
    sets: dict[Region, list[int]] = {}
    for index, region in enumerate(regions):
        if region is not None:
            sets.setdefault(region, []).append(index)
    for region, other in _neighbours(list(sets)):
        one, two = sets[region], sets[other]
        if one is not two and region.meets(other):
            more, fewer = (one, two) if len(one) >= len(two) else (two, one)
            more += fewer
            sets.update((known, more) for index in fewer if (known := regions[index]))
    found = {id(one): one for one in sets.values() if len(one) > 1}
    return [sorted(one, key=lambda index: (-_places(regions[index]), index)) for one in found.values()]


def _places(region: Region | None) -> int:
    return region.places if region else 0


def _neighbours(regions: Sequence[Region]) -> Iterator[tuple[Region, Region]]:
    """Yield pairs of regions whose stretches of memory overlap. The regions passed must all be different."""
    # Comparing all pairs would take minutes for thousands of gradients. Sorting separates most of them.
    for suspects in _suspects([(region.address, region.axes, region) for region in regions]):
        reaching: list[Region] = []
        for region in sorted(suspects, key=lambda region: (region.address, -region.end)):
            reaching = [other for other in reaching if other.end > region.address]
            yield from ((region, other) for other in reaching)
            reaching.append(region)


def _suspects(placed: Sequence[_Placed]) -> Iterator[list[Region]]:
    """Yield lists of regions that may overlap. Regions in different lists do not.

    Columns of one matrix, or pieces within its rows, are separated by their position within a row. For rows of a cube,
    repeat this with the remaining steps.
    """
    for group in _colliding(placed):
        step = max(axes[-1][0] if axes else 0 for _, axes, _ in group)
        base = min(start for start, _, _ in group)
        within = [
            ((start - base) % step, axes[:-1] if axes and axes[-1][0] == step else axes, region)
            for start, axes, region in group
            if step
        ]
        if within and all(start + _extent(axes, region.itemsize) <= step for start, axes, region in within):
            yield from _suspects(within)
        else:
            yield [region for _, _, region in group]


def _colliding(placed: Sequence[_Placed]) -> Iterator[list[_Placed]]:
    """Yield lists of two or more regions whose memory stretches overlap, directly or through others."""
    group: list[_Placed] = []
    end = 0
    for one in sorted(placed, key=lambda one: one[0]):
        start, axes, region = one
        if group and start >= end:
            if len(group) > 1:
                yield group
            group = []
        group.append(one)
        end = max(end if len(group) > 1 else 0, start + _extent(axes, region.itemsize))
    if len(group) > 1:
        yield group


def _extent(axes: _Axes, itemsize: int) -> int:
    return itemsize + sum(step * (count - 1) for step, count in axes)
