"""What a framework supplies besides its backend's operations, and what its kernels on a device do with plain arrays.

Its entry in `entries` loads it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.core.rules import Seen
from gradclip._src.tree import Sparse, Trees

if TYPE_CHECKING:
    from types import ModuleType

    from gradclip._src.backends import Shards
    from gradclip._src.backends.host.arrays import HostArray
    from gradclip._src.core.protocols import Backend, HostBackend


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


class Framework(ABC):
    """The front of a framework's folder. The methods implemented here are defaults."""

    namespace: "ModuleType"
    """The array API standard's operations for the framework's arrays."""

    @property
    def trees(self) -> Trees:
        """The framework's own functions on trees."""
        raise NotImplementedError

    @abstractmethod
    def backend(self, leaves: Sequence[Any], scalars: Sequence[Any]) -> "Backend":
        """Return the backend for these leaves and for the thresholds and masks passed with them."""

    def on_fast_path(self, leaves: Sequence[Any]) -> "HostBackend | None":
        """Return the backend if all leaves are in host memory with readable values, or None in case of doubt."""
        return None

    def on_device(self, leaves: Sequence[Any]) -> "OnDevice | None":
        """Return what clips all leaves on their device with kernels of our own, or None if that is not possible."""
        return None

    def gradients_of(self, parameters: Sequence[Any]) -> Sequence[Any] | None:
        """Return the gradients of the framework's parameters, or None if reading `.grad` is not enough."""
        return None

    @abstractmethod
    def on_host(self, leaf: object) -> "HostArray":
        """Return a view of an array's values in host memory, copied there if they are elsewhere."""

    def numbers(self, leaves: Sequence[Any]) -> list[np.ndarray]:
        """Return the numbers in arrays as flat float64 arrays. Waits once for all arrays of a device."""
        return [self.on_host(leaf).numbers() for leaf in leaves]

    def unwrapped(self, arrays: Sequence[Any]) -> "Shards | None":
        """Return arrays without types of users' own that only wrap them, or None if there are none."""
        return None

    def number(self, scalar: Any) -> Any:
        """Return the value of a scalar array as a Python number."""
        return scalar.item()

    def lies_itself(self, array: object) -> bool:
        """Say whether an array can be passed in place of a parameter and clipped in place itself, like NumPy's."""
        return False

    def may_be_weights(self, array: object) -> bool:
        """Say whether an array that can be clipped in place looks like a model's weights rather than a gradient."""
        return False

    def kept(self, array: Any) -> Any:
        """Return a copy that later changes to `array` do not affect, without waiting for a device."""
        return self.namespace.asarray(array, copy=True)

    def beside(self, array: Any, like: Any) -> Any:
        """Return the values of an array, without a derivative, on the device of `like`."""
        return array

    def is_traced(self, array: object) -> bool:
        """Say whether an array has no values yet because the call is being traced."""
        return False

    @abstractmethod
    def like(self, leaf: Any, dtype: str, values: np.ndarray) -> Any:
        """Return float64 numbers as an array with the named dtype, on the device of `leaf`."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], leaf: Any) -> Any:
        """Return zeros with the dtype and device of `leaf`."""

    @abstractmethod
    def as_float(self, array: object) -> Any:
        """Return an array in the framework's default float, at least float32."""

    generator = "no generator"
    """What `noised` takes, for errors."""

    def noised(self, leaves: Sequence[Any], std: float, rng: Any) -> list[Any] | None:
        """Return arrays with normal noise, in their own dtypes; None if `rng` is not the framework's generator."""
        return None

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function as training calls it: compiled, if the framework compiles."""
        return function

    def first_sparse(self, leaves: Sequence[Any]) -> Sparse | None:
        """Return the first sparse leaf, or None if all are dense."""
        return None

    def without_values(self, array: object) -> str | None:
        """Return a name for an array without values, such as a meta tensor, or None if it has values."""
        return None

    def is_bare(self, parameter: object) -> bool:
        """Say whether an array passed as a parameter cannot have a `.grad`."""
        return False

    def engine_of(self, parameter: object) -> str:
        """Return what to do if a training engine holds the gradient of a parameter elsewhere; empty if none does."""
        return ""
