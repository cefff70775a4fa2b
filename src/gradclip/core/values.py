"""Arrays of any framework, as portable code uses them, and their shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol


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
