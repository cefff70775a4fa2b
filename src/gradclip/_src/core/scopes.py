"""Scopes: which elements share a norm. A tree or a layer as a whole, each example of a batch, or each unit of a layer.

Norms, coefficients and divisors of one scope are arrays of one shape: the lengths of the scope's own axes. To add a
scope, add a value here; backends and rules ask it for the axes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

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
