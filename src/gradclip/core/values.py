"""The types that backends take and return: arrays, scopes, mesh axes, and arrays multiplied in one call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from gradclip.core.arrays import Arrays
    from gradclip.core.formats import Format
    from gradclip.core.nearest import Multiplier


class Array(Protocol):
    """An array or scalar of any framework, as portable code uses it. `other` is one too, or a number."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> Any: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __add__(self, other: Any, /) -> Array: ...
    def __mul__(self, other: Any, /) -> Array: ...
    def __truediv__(self, other: Any, /) -> Array: ...
    def __pow__(self, other: Any, /) -> Array: ...
    def __and__(self, other: Any, /) -> Array: ...
    def __lt__(self, other: Any, /) -> Array: ...
    def __gt__(self, other: Any, /) -> Array: ...
    def __invert__(self) -> Array: ...
    def __neg__(self) -> Array: ...
    def __float__(self) -> float: ...


class Scope(Protocol):
    """Which elements share a norm. `gradclip.core.scopes` has the implementations."""

    @property
    def whole(self) -> bool:
        """Whether all elements of all arrays share one norm."""

    @property
    def fixed(self) -> bool:
        """Whether a norm must be identical, to the last bit, no matter what else is measured."""

    def own_axes(self, ndim: int) -> tuple[int, ...]:
        """Return the axes, in order, along which each position has its own norm."""

    def shared_axes(self, ndim: int) -> tuple[int, ...]:
        """Return the axes, in order, whose elements share a norm."""

    def norms_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the norms for an array of this shape."""

    def elements(self, shape: Sequence[int]) -> int:
        """Return how many elements of an array of this shape share a norm."""

    def over(self, value: Array, like: Array) -> Array:
        """Reshape a value with one entry for each norm so that it broadcasts to an array. A scalar stays the same."""


# The assumed number of elements for a shape that is known only when the traced code runs.
_UNKNOWN = 1 << 31


def elements_of(shape: Sequence[int | None]) -> int:
    """Return the number of elements of an array of this shape, or 2**31 if a length is unknown."""
    known = [length for length in shape if length is not None]
    return math.prod(known) if len(known) == len(shape) else _UNKNOWN


def shape_of(array: object) -> tuple[Any, ...]:
    """Return an array's shape, or () if it has none. Raises ValueError if the number of axes is unknown."""
    shape = getattr(array, "shape", ())
    if getattr(shape, "rank", 0) is None:
        raise ValueError(
            "tf.function must know how many axes a tensor has while it traces. Declare the shape in the input "
            "signature, such as tf.TensorSpec([None, 3])."
        )
    return tuple(shape)


class AtOnce(Protocol):
    """Arrays that a device multiplies by one number in one call, rounding products to nearest."""

    elements: Mapping[Format, int]
    """The number of elements of each format, the widest format first."""

    def clear(self, arrays: Arrays) -> None:
        """Replace NaN and infinities by zeros in place."""

    def multiplied(self, arrays: Arrays, by: Multiplier) -> list[Any]:
        """Return the arrays, multiplied."""

    def update(self, leaves: Sequence[Any], arrays: Arrays, new: Arrays, by: Multiplier) -> Sequence[Any]:
        """Multiply `leaves` (as arrays: `arrays`) in place, from the values in `new`. Return them or replacements."""


class Axes(Protocol):
    """Mesh axes over which arrays are sharded, in code that runs on each device's own shards."""

    def count(self) -> int:
        """Return the number of devices along the axes."""

    def groups(self, arrays: Arrays) -> list[Arrays]:
        """Return lists of arrays, one list for each set of axes over which arrays are sharded."""

    def total(self, terms: Sequence[Any]) -> Any:
        """Return the sum of all devices' terms. A replicated term counts once."""

    def largest(self, terms: Sequence[Any]) -> Any:
        """Return the largest of all devices' terms."""
