"""Types of the public functions, for editors and type checkers.

Trees may be any containers; a function that returns a tree of the same structure uses the variable `Tree`. Norms and
other scalars belong to the tree's framework, which its type does not show; their type is `Scalar`.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Protocol,
    SupportsFloat,
    TypeAlias,
    TypedDict,
    TypeVar,
    runtime_checkable,
)

import numpy as np

from gradclip._src.public import record

if TYPE_CHECKING:
    from jax import Array
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
else:
    Array = Tensor = ProcessGroup = DeviceMesh = Any

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Tree = TypeVar("Tree")

Scalar: TypeAlias = Any
"""A scalar array of the gradients' framework."""

Threshold: TypeAlias = float | SupportsFloat
"""A number, or a scalar array of any framework; it may be traced."""


@record
@runtime_checkable
class Dataclass(Protocol):
    """An instance of a dataclass, such as a tree of Flax, Equinox or chex."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


@record
@runtime_checkable
class Node(Protocol):
    """An instance of a class that `register_pytree_node_class` of JAX or optree takes."""

    def tree_flatten(self) -> Any: ...


Thresholds: TypeAlias = Threshold | Mapping[Any, Any] | list[Any] | tuple[Any, ...] | Dataclass | Node
"""A `Threshold`, or a tree prefix of them. A container of a type that is registered otherwise is passed as `Any`."""

NamedThresholds: TypeAlias = Mapping[str, Any]
"""Patterns of names, and for each a `Threshold`, an `AdaptiveThreshold`, or None."""

Where: TypeAlias = Callable[[str], object] | str | Sequence[str] | None
"""A function that says whether a name is chosen, a pattern of names, or several; None chooses all."""

UnitAxis: TypeAlias = int | Sequence[int] | None
"""The axis or axes that index the units of a layer; None for the framework's own layout."""

Ord: TypeAlias = float | np.floating[Any] | np.integer[Any] | Literal["inf", "-inf"] | None
Policy: TypeAlias = Literal["propagate", "raise", "zero", "drop"]
StepPolicy: TypeAlias = Literal["propagate", "raise", "zero", "skip"]
"""A policy where a step can be skipped."""
Integers: TypeAlias = Literal["keep", "raise"]
RuleName: TypeAlias = Literal["clip", "normalize", "automatic"]
Relation: TypeAlias = Literal["add_or_remove_one", "replace_one", "zero_out"]
Unit: TypeAlias = Literal["example", "group"]
Method: TypeAlias = Literal["auto", "materialize", "ghost", "loop"]
OnMistake: TypeAlias = Literal["warn", "raise"]

AxisName: TypeAlias = Hashable
"""The name of a mesh axis, a tuple of names, or None."""


@record
@runtime_checkable
class HasDtype(Protocol):
    """An array of any framework."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> Any: ...


@record
@runtime_checkable
class HasGrad(Protocol[T_co]):
    """A parameter: an object whose `.grad` is its gradient, an array or None."""

    @property
    def grad(self) -> T_co | None: ...


@record
@runtime_checkable
class Several(Protocol[T_co]):
    """What can be iterated. Unlike an `Iterable`, pydantic passes it on as it is."""

    def __iter__(self) -> Iterator[T_co]: ...


@record
@runtime_checkable
class HasItemsize(Protocol):
    """A dtype of NumPy or PyTorch."""

    @property
    def itemsize(self) -> int: ...


Mask: TypeAlias = HasDtype | list[bool] | tuple[bool, ...] | None
"""Booleans, one for each example."""

Parameters: TypeAlias = HasGrad[Any] | Several[Any]
"""One parameter, or several: a list, a generator, named pairs, an optimizer's groups; or a tree of NumPy arrays."""

ProcessGroups: TypeAlias = ProcessGroup | Sequence[ProcessGroup] | None
Meshes: TypeAlias = DeviceMesh | Sequence[DeviceMesh] | None

WideDtype: TypeAlias = Literal["float32", "float64"] | type | HasItemsize
SumDtype: TypeAlias = WideDtype | Literal["float16", "bfloat16"]
Dtype: TypeAlias = str | type | HasItemsize
"""A dtype: its name, a type of NumPy or JAX, or a dtype object."""

# For overloads: what a call returns depends on the framework of what it is given.
Owners: TypeAlias = HasGrad[T] | Mapping[str, HasGrad[T]] | Several[HasGrad[T]] | Several[tuple[str, HasGrad[T]]]
Leaves: TypeAlias = T | Mapping[Any, T] | Sequence[T]
NumPyArray: TypeAlias = np.ndarray[Any, Any]
NumPyScalar: TypeAlias = np.floating[Any]
NumPyTree = TypeVar("NumPyTree", bound=Leaves[NumPyArray])
TorchTree = TypeVar("TorchTree", bound="Leaves[Tensor]")
JaxTree = TypeVar("JaxTree", bound="Leaves[Array]")


class Chosen(TypedDict, total=False):
    """Which gradients count."""

    where: Where
    integers: Integers


class OfShards(Chosen, total=False):
    """The arguments of calls that measure a tree."""

    axis_name: AxisName


class ClipsShards(OfShards, total=False):
    """The arguments of calls that clip a tree."""

    ord: Ord
    nonfinite: Policy


class OnProcesses(Chosen, total=False):
    """The arguments of calls that measure gradients of parameters."""

    process_group: ProcessGroups
    mesh: Meshes


class Clips(OnProcesses, total=False):
    """The arguments of calls that clip gradients of parameters."""

    nonfinite: Policy
