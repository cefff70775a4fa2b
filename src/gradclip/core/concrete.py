"""What the core asks of backends whose arrays are in host memory, beyond `protocols.Backend`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard

from gradclip.core.arrays import Arrays
from gradclip.core.layouts import Layout, Several
from gradclip.core.norms import Norm, Order
from gradclip.core.protocols import Backend
from gradclip.core.records import Coefficient
from gradclip.core.values import Array


class ConcreteBackend(Backend, Protocol):
    """What only backends whose arrays are in host memory offer, where reading values costs nothing."""

    def take(self, leaves: Sequence[Any]) -> Arrays:
        """Return leaves as `enter` returns prepared ones. Raises TypeError for dtypes that cannot be clipped."""

    def norms_at_once(self, arrays: Arrays, layout: Several, order: Order) -> tuple[Norm, Array] | None:
        """Return all norms of a layout as a vector, and which of them are settled; None if not computed at once.

        A norm is settled if it is finite and nothing was lost to underflow.
        """

    def scale_(self, arrays: Arrays, new: Arrays, coefficient: Coefficient, layout: Layout) -> None:
        """Scale arrays in place, from the values in `new`, whatever objects hold their memory."""

    def copies(self, arrays: Arrays) -> list[Any]:
        """Return copies of the arrays in the same memory order."""

    def entered_copies(self, copies: Sequence[Any]) -> Arrays:
        """Return the result of `copies` as arrays that share its memory."""

    def leave_scalars(self, values: Array, dtype: str, leaves: Sequence[Any]) -> list[Any]:
        """Return each entry of a wide vector in the named dtype. `leaves` has a leaf, or a list of them, for each."""

    def leave_vectors(self, values: Sequence[Any], dtype: str, leaves: Sequence[Any]) -> list[Any]:
        """Return wide arrays in the named dtype, each in the form of the corresponding leaf."""


def is_concrete(backend: Backend) -> TypeGuard[ConcreteBackend]:
    """Say whether the backend's arrays are in host memory."""
    return backend.concrete
