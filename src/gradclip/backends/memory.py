"""Where gradients lie in memory: which of them are views of the same elements, and which share only some."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from gradclip.backends.formats import dtype_name

# Whether two strided arrays share memory can take exponential time. NumPy gives up after so many attempts.
_MOST_WORK: Any = 1_000_000  # NumPy's stubs know two special values only

_Axes = tuple[tuple[int, int], ...]
_Placed = tuple[int, _Axes, "Region"]


@dataclass(frozen=True)
class Region:
    """A set of elements in memory; views of the same elements, whatever their shape, are equal.

    `axes`: steps in bytes, positive and growing, and how many elements, or runs of them, lie along each.
    """

    address: int
    itemsize: int
    dtype: str
    axes: _Axes

    @classmethod
    def of(
        cls, address: int, itemsize: int, dtype: str, shape: Sequence[int], strides: Sequence[int]
    ) -> "Region | None":
        """Return the region of an array, strides in bytes. None where elements, if any, share places: it is expanded.

        Such an array is never written.
        """
        if 0 in shape or not address:
            return None
        used = [(step, count) for count, step in zip(shape, strides, strict=True) if count > 1]
        # A negative step leads down: the first element is not the lowest then.
        address += sum(step * (count - 1) for step, count in used if step < 0)
        axes: list[tuple[int, int]] = []
        for step, count in sorted((abs(step), count) for step, count in used):
            # Axes that follow each other without a gap are one, so that views of other shapes are equal.
            if axes and step == axes[-1][0] * axes[-1][1]:
                axes[-1] = (axes[-1][0], axes[-1][1] * count)
            else:
                axes.append((step, count))
        # The axes are sorted, so that a step of 0 comes first.
        return None if axes and not axes[0][0] else cls(address, itemsize, dtype, tuple(axes))

    @property
    def end(self) -> int:
        """The address behind the last element."""
        return self.address + _extent(self.axes, self.itemsize)

    def meets(self, other: "Region") -> bool:
        """Say whether the regions share memory; also where that is too hard to tell."""
        try:
            return np.shares_memory(self._array(), other._array(), max_work=_MOST_WORK)
        except np.exceptions.TooHardError:
            return True

    def _array(self) -> np.ndarray:
        """Return an array at these addresses, of which nothing may be read."""

        # NumPy tells whether strided arrays share memory, so it gets an array. It looks at places, not at values.
        class At:
            __array_interface__ = {  # noqa: RUF012
                "data": (self.address, True),
                "shape": tuple(count for _, count in self.axes),
                "strides": tuple(step for step, _ in self.axes),
                "typestr": f"|V{self.itemsize}",
                "version": 3,
            }

        return np.asarray(At())


def region_of_array(array: np.ndarray) -> Region | None:
    """Return the region of a NumPy array."""
    address, _ = array.__array_interface__["data"]
    return Region.of(address, array.itemsize, dtype_name(array), array.shape, array.strides)


def any_overlap(stretches: Iterable[tuple[int, int]]) -> bool:
    """Say whether two stretches of memory (begin, end) have bytes in common."""
    # Sorted by where they begin: if any two overlap, then two neighbours do.
    return any(end > begin for (_, end), (begin, _) in pairwise(sorted(stretches)))


def first_meeting(regions: Sequence[Region]) -> tuple[Region, Region] | None:
    """Return two of these different regions that share memory, None where no two do."""
    # To compare each with each would take minutes for thousands of gradients; most are told apart by sorting.
    for suspects in _suspects([(region.address, region.axes, region) for region in regions]):
        in_order = sorted(suspects, key=lambda region: region.address)
        for index, region in enumerate(in_order):
            for other in in_order[index + 1 :]:
                # In the order of addresses all that follow begin later still.
                if other.address >= region.end:
                    break
                if region.meets(other):
                    return region, other
    return None


def _suspects(placed: Sequence[_Placed]) -> Iterator[list[Region]]:
    """Yield lists of regions that may share memory; those of different lists do not.

    Columns of one matrix, and what lies within a row of it, are told apart by their places within a row. Rows of a cube
    are the same again, for the steps that are left.
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
    """Yield lists of two or more regions that are linked by overlapping stretches of memory."""
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


def shared(regions: Sequence[Region | None]) -> tuple[list[list[int]], tuple[int, int] | None]:
    """Return the indices grouped by region, and those of two regions that share only some elements, None without."""
    lying: dict[Any, list[int]] = {}
    for index, region in enumerate(regions):
        # Without a region a gradient shares memory with no other, so its index is its key.
        lying.setdefault(index if region is None else region, []).append(index)
    meeting = first_meeting([region for region in lying if isinstance(region, Region)])
    pair = None if meeting is None else (lying[meeting[0]][0], lying[meeting[1]][0])
    return list(lying.values()), pair
