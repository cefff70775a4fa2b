"""Pieces of parameters within an array, followed through operations that only move elements.

Every axis of a piece is a product of factors. A factor walks along one axis of the parameter with a stride. So axes can
be split, joined, exchanged and cut, and at the end the factors say which box of the parameter the piece is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class NotFollowedError(Exception):
    """The elements of a parameter are moved in a way that is not followed."""


class Factor(NamedTuple):
    """`size` steps of `stride` along an axis of the parameter. Axis -1 is no axis of it: `stride` is then a name."""

    axis: int
    stride: int
    size: int


Factors = tuple[Factor, ...]


@dataclass(frozen=True)
class Piece:
    """A piece of parameter `leaf` that begins at `offset` in an array, and at `start` in the parameter.

    `loops` has an entry for each enclosing loop: the factors that the loop goes through, or () if it does not.
    """

    leaf: int
    start: tuple[int, ...]
    axes: tuple[Factors, ...]
    offset: tuple[int, ...]
    loops: tuple[Factors, ...] = ()

    @classmethod
    def whole(cls, leaf: int, shape: Sequence[int]) -> Piece:
        """Return the piece that is a whole parameter."""
        axes = tuple(_long([Factor(axis, 1, size)]) for axis, size in enumerate(shape))
        return cls(leaf, (0,) * len(shape), axes, (0,) * len(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return tuple(map(length, self.axes))

    @property
    def elements(self) -> int:
        """The number of elements, in all steps of the enclosing loops."""
        return math.prod(map(length, (*self.axes, *self.loops)))

    def transposed(self, order: Sequence[int]) -> Piece:
        """Return the piece with its axes in another order."""
        return replace(self, axes=_taken(self.axes, order), offset=_taken(self.offset, order))

    def spread(self, ndim: int, places: Sequence[int]) -> Piece:
        """Return the piece with axis i at `places[i]` of `ndim` axes, and axes of length 1 between."""
        found = dict(zip(places, zip(self.axes, self.offset, strict=True), strict=True))
        axes, offset = zip(*(found.get(i, ((), 0)) for i in range(ndim)), strict=True) if ndim else ((), ())
        return replace(self, axes=axes, offset=offset)

    def without(self, dropped: Sequence[int]) -> Piece:
        """Return the piece without these axes, which have length 1."""
        return self.transposed([i for i in range(len(self.axes)) if i not in dropped])

    def reshaped(self, shape: Sequence[int], new: Sequence[int]) -> Piece:
        """Return the piece after a reshape of its array from `shape` to `new`."""
        kept = [i for i, size in enumerate(shape) if size != 1]
        places = [i for i, size in enumerate(new) if size != 1]
        if [shape[i] for i in kept] == [new[i] for i in places]:
            return self.transposed(kept).spread(len(new), places)
        if self.shape != tuple(shape):
            raise NotFollowedError
        return replace(self, axes=_regrouped(self.axes, new), offset=(0,) * len(new))

    def cut(self, axis: int, start: int, stop: int) -> Piece | None:
        """Return what is left after a slice of its array along one axis; None if nothing is."""
        begins = self.offset[axis]
        first, last = max(start - begins, 0), min(stop - begins, length(self.axes[axis]))
        if last <= first:
            return None
        factors, moved = _cut(self.axes[axis], first, last)
        begin = tuple(at + moved.get(i, 0) for i, at in enumerate(self.start))
        return replace(self, start=begin, axes=_put(self.axes, axis, factors)).moved(axis, max(begins - start, 0))

    def moved(self, axis: int, to: int) -> Piece:
        """Return the piece at another offset."""
        return replace(self, offset=_put(self.offset, axis, to))

    def looped(self, level: int, size: int) -> Piece:
        """Return one step of a loop over axis 0, which is the loop at this level."""
        if self.offset[0] or length(self.axes[0]) != size:
            raise NotFollowedError
        loops = (*self.loops, *[()] * (level - len(self.loops)), self.axes[0])
        return replace(self, axes=self.axes[1:], offset=self.offset[1:], loops=loops)


def length(factors: Factors) -> int:
    """Return the length of an axis that is a product of factors."""
    return math.prod(factor.size for factor in factors)


def split(factors: Factors, outer: int) -> tuple[Factors, Factors]:
    """Return the factors of an axis as those of its outer `outer` steps, and the rest."""
    first, second = _regrouped((factors,), (outer, length(factors) // max(outer, 1)))
    return first, second


def _long(factors: Sequence[Factor]) -> Factors:
    return tuple(factor for factor in factors if factor.size != 1)


def _taken(values: Sequence[T], order: Sequence[int]) -> tuple[T, ...]:
    return tuple(values[i] for i in order)


def _put(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _regrouped(axes: Sequence[Factors], shape: Sequence[int]) -> tuple[Factors, ...]:
    """Return the factors of the axes after a reshape, which keeps their order."""
    rest = _joined([factor for axis in axes for factor in axis])[::-1]
    new = []
    for size in shape:
        group: list[Factor] = []
        while length(tuple(group)) != size:
            missing = size // length(tuple(group))
            if not rest or not missing or size % length(tuple(group)):
                raise NotFollowedError
            axis, stride, here = rest.pop()
            taken = here if missing % here == 0 else missing
            if here % taken:
                raise NotFollowedError
            group.append(Factor(axis, stride * (here // taken), taken))
            if taken != here:
                rest.append(Factor(axis, stride, here // taken))
        new.append(tuple(group))
    return tuple(new)


def _joined(factors: Sequence[Factor]) -> list[Factor]:
    """Return the factors with neighbors joined that walk on where the other ends."""
    joined: list[Factor] = []
    for factor in factors:
        last = joined[-1] if joined else None
        if last is not None and last.axis == factor.axis and last.stride == factor.stride * factor.size:
            joined[-1] = Factor(factor.axis, factor.stride, last.size * factor.size)
        else:
            joined.append(factor)
    return joined


def _cut(factors: Factors, start: int, stop: int) -> tuple[Factors, dict[int, int]]:
    """Return the factors of a part of an axis, and how far it begins along the axes of the parameter."""
    if start == 0 and stop == length(factors):
        return factors, {}
    axis, stride, _ = factors[0]
    inner = length(factors[1:])
    if start % inner == 0 and stop % inner == 0:
        first, last = start // inner, stop // inner
        return (*_long([Factor(axis, stride, last - first)]), *factors[1:]), {axis: first * stride}
    at = start // inner
    if at != (stop - 1) // inner:
        raise NotFollowedError
    rest, moved = _cut(factors[1:], start - at * inner, stop - at * inner)
    return rest, {**moved, axis: moved.get(axis, 0) + at * stride}
