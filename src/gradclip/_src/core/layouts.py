"""Layouts, which say who shares a norm: a `Scope`, `Groups` of arrays, or the units of each array, its `Rows`.

The last two have several norms, and consist of parts. A part is what can be measured and scaled on its own: the arrays
at some indices, with the scope that says which of their elements share a norm. Norms, thresholds and coefficients are
vectors: those of the first part, then those of the second, and so on.

Norms, coefficients and divisors of one scope are arrays of one shape: the lengths of the scope's own axes. To add a
scope, add a value here; backends and rules ask it for the axes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gradclip._src.core.formats import bare_name, is_complex_name
from gradclip._src.core.values import Array, elements_of


@dataclass(frozen=True)
class Scope:
    """A choice of axes: each position along the own axes has a norm, shared by all elements along the other axes.

    `own` returns the own axes for a number of axes; negative ones count from the end. It is None if all elements of all
    arrays share one norm. Otherwise, arrays measured together have own axes of the same lengths. `fixed`: a norm must
    be the same, to the last bit, whatever else is measured. `exact`: norms close to their
    thresholds are decided exactly.
    """

    name: str
    own: Callable[[int], Sequence[int]] | None = None
    fixed: bool = False
    exact: bool = True
    whole: bool = field(init=False)  # whether all elements of all arrays share one norm

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole", self.own is None)

    def own_axes(self, ndim: int) -> tuple[int, ...]:
        """Return the sorted axes along which each position has its own norm."""
        return () if self.own is None or not ndim else tuple(sorted(axis % ndim for axis in self.own(ndim)))

    def shared_axes(self, ndim: int) -> tuple[int, ...]:
        """Return the sorted axes whose elements share a norm."""
        own = self.own_axes(ndim)
        return tuple(axis for axis in range(ndim) if axis not in own)

    def norms_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the norms of an array of this shape."""
        return tuple(shape[axis] for axis in self.own_axes(len(shape)))

    def elements(self, shape: Sequence[int]) -> int:
        """Return how many elements of an array of this shape share a norm."""
        return elements_of([shape[axis] for axis in self.shared_axes(len(shape))])

    def over(self, value: Array, like: Array) -> Array:
        """Reshape a value with one entry per norm so that it broadcasts to an array; scalars are returned unchanged."""
        if self.own is None or getattr(value, "ndim", 0) == 0:
            return value
        own = self.own_axes(like.ndim)
        return value[tuple(slice(None) if axis in own else None for axis in range(like.ndim))]


@dataclass(frozen=True)
class _Along:
    """The same own axes for every array; scopes with the same axes are equal."""

    axes: tuple[int, ...]

    def __call__(self, ndim: int) -> tuple[int, ...]:
        return self.axes

    def __hash__(self) -> int:
        return hash(_Along)  # not of the axes: when compiling, PyTorch 2.11 hashes what it calls before it has any


def units_along(axes: tuple[int, ...]) -> Scope:
    """Return the scope of units indexed by these axes; without axes, an array is one unit."""
    return Scope("unit", _Along(axes))


def units_of_layer(shape: Sequence[int], *, first: bool) -> Scope:
    """Return the scope of a layer's units, one for each output; outputs are on the first axis, or on the last axes.

    For the last axes: a matrix is (inputs, outputs), three axes are (inputs, heads, outputs of a head), more axes are
    (..., inputs, outputs), and an array with at most one axis longer than 1 is one unit.
    """
    ndim = len(shape)
    if ndim < 2 or (not first and sum(length != 1 for length in shape) < 2):
        return units_along(())
    return units_along((0,) if first else (1, 2) if ndim == 3 else (ndim - 1,))


TREE = Scope("tree")
LAYER = Scope("layer")
EXAMPLE = Scope("example", lambda ndim: (0,), exact=False)
EXAMPLE_ALONE = replace(EXAMPLE, fixed=True)


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


def real_numbers(leaves: Iterable[Any], scope: Scope) -> int:
    """Return how many real numbers share one norm in these leaves."""
    return sum(scope.elements(x.shape) * (1 + is_complex_name(bare_name(x.dtype))) for x in leaves)
