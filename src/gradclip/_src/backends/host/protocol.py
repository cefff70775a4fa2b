"""What the core asks of backends with arrays in host memory, beyond `Backend`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from gradclip._src.core.protocols import Backend, ConcreteBackend

if TYPE_CHECKING:
    import numpy as np

    from gradclip._src.backends.host.arrays import HostArrays
    from gradclip._src.native._kernels import Arrays as KernelArrays


class HostBackend(ConcreteBackend, Protocol):
    """What only backends with arrays in host memory offer: the kernels, and many layers in one call."""

    immutable: bool  # whether an array can serve as its own copy

    def enter(self, prepared: Sequence[Any]) -> HostArrays:
        """Return prepared leaves as arrays, described to the kernels where they can read them."""

    def known(self, leaves: Sequence[Any]) -> KernelArrays | None:
        """Return the leaves as described to the kernels, or None if the kernels cannot read all of them."""

    def arrays_of(self, leaves: Sequence[Any], kernels: KernelArrays) -> HostArrays:
        """Return leaves that `known` has described to the kernels as arrays."""

    def new_like(self, leaves: Sequence[Any], *, copied: bool) -> list[Any]:
        """Return new leaves with the same memory order: copies, or with arbitrary values."""

    def number(self, value: float, dtype: str) -> Any:
        """Return a number as a scalar of the framework."""

    def array(self, values: np.ndarray | np.generic, dtype: str) -> Any:
        """Return numbers as a new array of the framework in the named dtype."""

    def wrote(self, leaves: Sequence[Any]) -> None:
        """Tell the framework that gradients were written behind its back."""

    def threads(self) -> int:
        """Return how many threads a call may use."""


def in_host_memory(backend: Backend) -> TypeGuard[HostBackend]:
    """Say whether the backend's arrays are in host memory."""
    return backend.concrete
