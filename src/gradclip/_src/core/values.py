"""Arrays of any framework, as portable code uses them, their shapes, and the arithmetic of their norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol

from gradclip._src.core.formats import Format


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


class Arithmetic(Protocol):
    """The number formats a backend computes in, and its scalars: norms, thresholds and coefficients."""

    xp: ModuleType
    """The array API standard's operations."""
    wide: Format
    """The format in which sums are computed: float64 if the device has it."""
    concrete: bool
    """Whether values are in host memory, where reading them costs nothing."""
    visible: bool
    """Whether values can be read, even if that means waiting for a device."""

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context in which `wide` can be used."""

    def scalar(self, value: float | Array, near: Sequence[Array]) -> Array:
        """Return a number as a wide scalar on the arrays' device."""

    def booleans(self, mask: object) -> Array:
        """Return a mask as a boolean array."""

    def zeros(self, shape: tuple[int, ...], near: Sequence[Array]) -> Array:
        """Return wide zeros on the arrays' device."""

    def varies(self, value: object) -> bool:
        """Say whether a number stands for many: code is being compiled for all values that it may have."""

    def stacked(self, scalars: Sequence[Array]) -> Array:
        """Stack scalars into a vector."""

    def unstacked(self, vectors: Sequence[Array]) -> list[list[Array]]:
        """Split each vector into scalars."""


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
