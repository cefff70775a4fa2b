"""What a framework supplies beside the operations of its backend. Its entry in `entries` says where that is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from types import ModuleType

    from gradclip.backends import Backend
    from gradclip.backends.batching import Batching
    from gradclip.backends.host.arrays import HostArray
    from gradclip.backends.protocols import HostBackend


class Sparse(NamedTuple):
    """A sparse array among leaves: its place, what it is called, and the method that makes it dense."""

    place: int
    kind: str
    method: str


class Trees(Protocol):
    """Functions on trees. A structure is what is left of a tree without its leaves."""

    def knows(self, leaf: object) -> bool:
        """Say whether something that is no array of any framework is a node, or a sparse array, of this one's."""

    def flatten(self, tree: object) -> tuple[list[Any], Any]:
        """Return the leaves in order, and the structure."""

    def unflatten(self, structure: Any, leaves: Iterable[Any]) -> Any:
        """Return the tree of a structure around other leaves."""

    def paths(self, structure: Any) -> list[str]:
        """Return the path of each leaf, written as the Python that reaches it."""

    def keys(self, structure: Any) -> list[tuple[Any, ...]]:
        """Return what leads to each leaf: keys, indices and names of attributes."""

    def subtrees(self, structure: Any, tree: object) -> list[Any]:
        """Return what lies in a tree where a structure has leaves. Raises ValueError where it is no prefix."""

    def sparse(self, leaves: Sequence[Any]) -> Mapping[int, Any]:
        """Return those of the leaves that are sparse, by their indices."""

    def described(self, place: int, array: Any) -> Sparse:
        """Return what an error says of a sparse array."""

    def elements(self, array: Any) -> Any:
        """Return an array of a sparse one's elements."""

    def with_elements(self, array: Any, elements: object) -> Any:
        """Return a sparse array like this one, with other elements."""


class Framework(ABC):
    """The front of a framework's folder. What is written out here holds where a framework does not differ."""

    namespace: "ModuleType"
    """The operations of the array API standard over the framework's arrays."""

    @property
    def trees(self) -> Trees:
        """The framework's own functions on trees."""
        raise NotImplementedError

    @abstractmethod
    def backend(self, leaves: Sequence[Any], scalars: Sequence[Any]) -> "Backend":
        """Return the backend for these leaves, and for the thresholds and masks that come with them."""

    def on_fast_path(self, leaves: Sequence[Any]) -> "HostBackend | None":
        """Return the backend for arrays in host memory whose values anyone may see; None where in doubt."""
        return None

    def gradients_of(self, parameters: Sequence[Any]) -> Sequence[Any] | None:
        """Return the gradients of parameters of the framework; None where it takes more than to read them."""
        return None

    def batching(self, method: str) -> "Batching":
        """Return what takes functions over batches: all examples at a time, or for "loop" one after the other."""
        raise NotImplementedError

    @abstractmethod
    def on_host(self, leaf: object) -> "HostArray":
        """Return a view of an array's values in host memory, copied there if they lie elsewhere."""

    def numbers(self, leaves: Sequence[Any]) -> list[np.ndarray]:
        """Return the numbers in arrays, flat, in float64. Those of a device are waited for together."""
        return [self.on_host(leaf).numbers() for leaf in leaves]

    def number(self, scalar: Any) -> Any:
        """Return the number in a scalar array, as a number of Python."""
        return scalar.item()

    def lies_itself(self, array: object) -> bool:
        """Say whether an array can be clipped where it lies, passed itself in place of a parameter, as NumPy's can."""
        return False

    def may_be_weights(self, array: object) -> bool:
        """Say whether an array that can be clipped where it lies looks like a model's weights, not like a gradient."""
        return False

    def kept(self, array: Any) -> Any:
        """Return an array that stays as it is, whatever is done to this one later. Nothing waits for a device."""
        return self.namespace.asarray(array, copy=True)

    def is_traced(self, array: object) -> bool:
        """Say whether an array stands for values that come later, when what was recorded runs."""
        return False

    @abstractmethod
    def like(self, leaf: Any, dtype: str, values: np.ndarray) -> Any:
        """Return float64 numbers as an array on the device of `leaf`, in the named dtype."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], leaf: Any) -> Any:
        """Return zeros in the dtype of `leaf`, on its device."""

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function as it is called in training: as one program where the framework makes programs."""
        return function

    def first_sparse(self, leaves: Sequence[Any]) -> Sparse | None:
        """Return the first of the leaves that is a sparse array; None where all are dense."""
        return None

    def without_values(self, array: object) -> str | None:
        """Return what an array that holds no values is called; None for one that does."""
        return None

    def is_bare(self, parameter: object) -> bool:
        """Say whether an array cannot have a `.grad`, and was passed where a parameter belongs."""
        return False
