"""Gradients in memory: which of them share elements, wholly or in part."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

# Finding out whether two strided arrays overlap can take exponential time. NumPy gives up after this many attempts.
_MOST_WORK: Any = 1_000_000  # NumPy's stubs allow only two special values


@dataclass(frozen=True)
class Region:
    """A set of elements in memory. Views of the same elements are equal, whatever their shapes.

    `axes` holds, for each axis, the step in bytes (positive, ascending) and the number of elements, or of runs of
    elements.
    """

    address: int
    itemsize: int
    axes: tuple[tuple[int, int], ...]

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

    @cached_property
    def end(self) -> int:
        """The address just past the last element."""
        return self.address + self.itemsize + sum(step * (count - 1) for step, count in self.axes)

    def meets(self, other: "Region") -> bool:
        """Say whether two regions whose stretches overlap share an element. True also if that is hard to find out."""
        try:
            return np.shares_memory(self._placed, other._placed, max_work=_MOST_WORK)
        except np.exceptions.TooHardError:
            return True

    @cached_property
    def _placed(self) -> np.ndarray:
        """An array at these addresses. NumPy compares them; the array must not be read."""
        interface = {
            # Tensors without values have addresses of more than 64 bits. At address 0, NumPy would take memory.
            "data": (self.address % 2**62 + 1, True),
            "shape": tuple(count for _, count in self.axes),
            "strides": tuple(step for step, _ in self.axes),
            "typestr": f"|V{self.itemsize}",
            "version": 3,
        }
        return np.asarray(SimpleNamespace(__array_interface__=interface))


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
    reaching: list[Region] = []
    for region in sorted(sets, key=lambda region: (region.address, -region.end)):
        reaching = [other for other in reaching if other.end > region.address]
        for other in reaching:
            one, two = sets[region], sets[other]
            if one is not two and region.meets(other):
                more, fewer = (one, two) if len(one) >= len(two) else (two, one)
                more += fewer
                sets.update((known, more) for index in fewer if (known := regions[index]))
        reaching.append(region)
    found = {id(one): one for one in sets.values() if len(one) > 1}
    return [sorted(one, key=lambda index: (-_places(regions[index]), index)) for one in found.values()]


def _places(region: Region | None) -> int:
    return region.places if region else 0
