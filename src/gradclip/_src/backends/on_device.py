"""What kernels on a device do with plain arrays: measure, decide and scale them without waiting."""

from collections.abc import Sequence
from typing import Any, Protocol

from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.core.rules import Seen


class OnDevice(Protocol):
    """Plain arrays of one device. What is not possible in this way, the methods leave as it is, and return None.

    Thresholds are numbers, or what `threshold` returns.
    """

    @property
    def leaves(self) -> Sequence[Any]:
        """The arrays."""

    def apart(self) -> bool:
        """Say whether no two arrays share memory."""

    def threshold(self, max_norm: object) -> Any:
        """Return a scalar on this device, which has no derivative, as a threshold; None if it is none."""

    def norm(self, order: Order) -> Any:
        """Return the norm of all arrays."""

    def clip_(self, max_norm: Any, order: Order, policy: Nonfinite) -> Any:
        """Clip the arrays in place; return their norm."""

    def clip_watched_(
        self, max_norm: Any, order: Order, policy: Nonfinite, *, each: bool, skip_above: float | None
    ) -> tuple[Any, Any, Seen | None] | None:
        """Clip the arrays in place; return their norm, and if asked, that of each as wide numbers and what it shows."""

    def clip_each_(self, max_norm: Any, order: Order, policy: Nonfinite) -> Any:
        """Clip each array in place by its own norm; return the norms. The threshold is one for all, or a list."""

    def clip_parts_(self, part_of: Sequence[int], max_norms: Sequence[float], order: Order, policy: Nonfinite) -> Any:
        """Clip parts in place, each by its own norm; return the norm of all.

        `part_of` is the number of each array's part. A part that is not finite counts for all.
        """

    def clipped(self, max_norm: Any, order: Order, policy: Nonfinite) -> tuple[list[Any], Any] | None:
        """Return new arrays, clipped, and the norm of all."""
