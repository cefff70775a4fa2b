"""Layouts with several norms: groups of arrays, or the units of each array. `scopes` has those with one kind of axes.

A layout consists of parts. A part is what can be measured and scaled on its own: the arrays at some indices, with the
scope that says which of their elements share a norm. Norms, thresholds and coefficients of a layout are vectors: those
of the first part, then those of the second, and so on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gradclip._src.core.scopes import LAYER, Scope


class Part(NamedTuple):
    """The indices of arrays, and the scope of their norms."""

    indices: Sequence[int]
    scope: Scope


class Units(NamedTuple):
    """The units of an array: their own axes, the shape of their norms, their number, and the elements of each."""

    own: tuple[int, ...]
    norms_shape: tuple[int, ...]
    number: int
    elements: int


@dataclass(frozen=True, eq=False)
class Groups:
    """Each group of arrays, given by their indices, shares a norm. `alone`: group i holds array i and nothing else.

    `joint`: NaN and infinity in one group count for all groups, as if all were one.
    """

    groups: Sequence[Sequence[int]]
    alone: bool = False
    joint: bool = False
    numbers: Sequence[int] | None = None  # the number of the group of each array, if that is known
    whole: ClassVar[bool] = False

    @classmethod
    def consecutive(cls, groups: Sequence[Sequence[int]]) -> "Groups":
        """Return groups of the same sizes, of arrays in order."""
        ends = [0, *accumulate(map(len, groups))]
        return cls([range(start, end) for start, end in pairwise(ends)])

    @classmethod
    def each_alone(cls, count: int) -> "Groups":
        """Return so many groups of one array each."""
        return cls([(index,) for index in range(count)], alone=True)

    @classmethod
    def of_numbers(cls, numbers: Sequence[int], count: int) -> "Groups":
        """Return so many groups, given the number of the group of each array."""
        groups: list[list[int]] = [[] for _ in range(count)]
        for index, number in enumerate(numbers):
            groups[number].append(index)
        return cls(groups, numbers=numbers)

    @property
    def number(self) -> int:
        """The number of parts."""
        return len(self.groups)

    count = number
    """The number of norms."""

    @property
    def parts(self) -> list[Part]:
        """The groups."""
        return [Part(group, LAYER) for group in self.groups]

    def part(self, number: int) -> Part:
        """Return one of the groups."""
        return Part(self.groups[number], LAYER)

    def group_of(self) -> dict[int, int]:
        """Return the number of the group of each array."""
        return {index: number for number, group in enumerate(self.groups) for index in group}

    def places(self, number: int) -> slice:
        """Return where the norm of a part is in a vector of norms."""
        return slice(number, number + 1)

    def parts_of(self, flags: np.ndarray) -> list[int]:
        """Return the numbers of the parts of which a flag is set, given one flag for each norm."""
        return np.flatnonzero(flags).tolist()

    def each(self, of_parts: Sequence[float]) -> np.ndarray:
        """Return a vector with one entry for each norm, given one number for each part."""
        return np.array(of_parts, float)

    def shaped(self, values: np.ndarray) -> list[Any]:
        """Return the entries of each part in the shape of its norms."""
        return list(values)


@dataclass(frozen=True, eq=False)
class Rows:
    """Each unit of each array has a norm. There is a scope and a shape for each array."""

    scopes: Sequence[Scope]
    shapes: Sequence[tuple[int, ...]]
    whole: ClassVar[bool] = False
    joint: ClassVar[bool] = False

    @property
    def parts(self) -> list[Part]:
        """The arrays, one by one."""
        return [Part((index,), scope) for index, scope in enumerate(self.scopes)]

    def part(self, number: int) -> Part:
        """Return one of the arrays."""
        return Part((number,), self.scopes[number])

    @cached_property
    def units(self) -> list[Units]:
        """The units of each array."""
        return list(map(units_of, self.scopes, self.shapes))

    @cached_property
    def outputs_first(self) -> bool:
        """Whether the own axes of all arrays are the first ones."""
        return all(units.own == tuple(range(len(units.own))) for units in self.units)

    @cached_property
    def array_of(self) -> np.ndarray:
        """The index of the array of each norm."""
        return np.repeat(np.arange(len(self.units)), [units.number for units in self.units])

    @cached_property
    def ends(self) -> np.ndarray:
        """The place after the last norm of each array, in a vector of norms."""
        return np.cumsum([units.number for units in self.units])

    @property
    def number(self) -> int:
        """The number of parts."""
        return len(self.scopes)

    @property
    def count(self) -> int:
        """The number of norms."""
        return len(self.array_of)

    def places(self, number: int) -> slice:
        """Return where the norms of a part are in a vector of norms."""
        end = int(self.ends[number])
        return slice(end - self.units[number].number, end)

    def parts_of(self, flags: np.ndarray) -> list[int]:
        """Return the numbers of the parts of which a flag is set, given one flag for each norm."""
        return np.flatnonzero(np.bincount(self.array_of[flags], minlength=len(self.units))).tolist()

    def each(self, of_parts: Sequence[float]) -> np.ndarray:
        """Return a vector with one entry for each norm, given one number for each part."""
        return np.array(of_parts, float)[self.array_of]

    def shaped(self, values: np.ndarray) -> list[Any]:
        """Return the entries of each part in the shape of its norms."""
        return [values[self.places(number)].reshape(units.norms_shape) for number, units in enumerate(self.units)]


Several = Groups | Rows
"""A layout with several norms."""

Layout = Scope | Groups | Rows
"""Which elements share a norm."""


# Cached: many arrays have the same shape, and this takes longer than measuring a small array.
@lru_cache(maxsize=256)
def units_of(scope: Scope, shape: tuple[int, ...]) -> Units:
    """Return the units of an array of this shape."""
    of_norms = scope.norms_shape(shape)
    return Units(scope.own_axes(len(shape)), of_norms, math.prod(of_norms), scope.elements(shape))
