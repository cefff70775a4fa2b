"""What the core and the backends ask of each other."""

from collections.abc import Sequence
from typing import Any, Protocol


class Scope(Protocol):
    """Which elements share a norm. `gradclip.scopes` has the values."""

    @property
    def whole(self) -> bool:
        """Whether all elements of all arrays share one norm."""

    def own_axes(self, ndim: int) -> tuple[int, ...]:
        """Return the axes, in order, along which each place has a norm of its own."""

    def shared_axes(self, ndim: int) -> tuple[int, ...]:
        """Return the axes, in order, whose elements share a norm."""

    def norms_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the norms of an array of this shape."""

    def elements(self, shape: Sequence[int]) -> int:
        """Return how many elements of an array of this shape share a norm."""

    def over(self, value: Any, like: Any) -> Any:
        """Shape what there is one of for each norm so that it broadcasts to an array; a scalar does as it is."""
