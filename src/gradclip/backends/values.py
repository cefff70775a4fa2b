"""What backends are given and hand out: arrays, scopes, axes of a mesh, arrays that are multiplied at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from gradclip.backends.arrays import Arrays
    from gradclip.backends.formats import Format
    from gradclip.core.nearest import Multiplier


class Array(Protocol):
    """What portable code computes with: an array, or a scalar, of any framework; `other` is one too, or a number."""

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
    """Which elements share a norm. `gradclip.core.scopes` has the values."""

    @property
    def whole(self) -> bool:
        """Whether all elements of all arrays share one norm."""

    @property
    def fixed(self) -> bool:
        """Whether a norm must be the same, to the last bit, whatever else is measured."""

    def own_axes(self, ndim: int) -> tuple[int, ...]:
        """Return the axes, in order, along which each place has a norm of its own."""

    def shared_axes(self, ndim: int) -> tuple[int, ...]:
        """Return the axes, in order, whose elements share a norm."""

    def norms_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the norms of an array of this shape."""

    def elements(self, shape: Sequence[int]) -> int:
        """Return how many elements of an array of this shape share a norm."""

    def over(self, value: Array, like: Array) -> Array:
        """Shape a value with one entry for each norm so that it broadcasts to an array. A scalar stays as it is."""


# What an array may have whose shape is known only when the code that was traced runs.
_UNKNOWN = 1 << 31


def elements_of(shape: Sequence[int | None]) -> int:
    """Return how many elements an array of this shape has; 2**31 where a length is not known."""
    known = [length for length in shape if length is not None]
    return math.prod(known) if len(known) == len(shape) else _UNKNOWN


def shape_of(array: object) -> tuple[Any, ...]:
    """Return the shape of an array, () of what has none. Raises ValueError where nobody knows how many axes it has."""
    shape = getattr(array, "shape", ())
    if getattr(shape, "rank", 0) is None:
        raise ValueError(
            "how many axes a tensor has must be known while tf.function records it. Say it in the signature, as by "
            "tf.TensorSpec([None, 3])."
        )
    return tuple(shape)


class AtOnce(Protocol):
    """Arrays that a device multiplies all at once by one number, with products that are rounded to nearest."""

    elements: Mapping[Format, int]
    """How many there are of each dtype, the widest first."""

    def clear(self, arrays: Arrays) -> None:
        """Put zeros in place of NaN and the infinities, where the arrays lie."""

    def multiplied(self, arrays: Arrays, by: Multiplier) -> list[Any]:
        """Return the arrays multiplied."""

    def update(self, leaves: Sequence[Any], arrays: Arrays, new: Arrays, by: Multiplier) -> Sequence[Any]:
        """Multiply the gradients `leaves`, which are `arrays`, from `new` on; return them, or what replaces them."""


class Axes(Protocol):
    """Axes of a mesh, over which arrays are sharded, in code that runs on each device's own shards."""

    def count(self) -> int:
        """Return how many devices there are along them."""

    def groups(self, arrays: Arrays) -> list[Arrays]:
        """Return lists of the arrays, one for each set of axes that they are sharded over."""

    def total(self, terms: Sequence[Any]) -> Any:
        """Return the sum of the terms of all devices. A term that is replicated counts once."""

    def largest(self, terms: Sequence[Any]) -> Any:
        """Return the largest of the terms of all devices."""
