"""Types of the public functions, for editors and type checkers.

Trees may be any containers; a function that returns a tree of the same structure uses the variable `Tree`. Norms and
other scalars belong to the tree's framework, which its type does not show; their type is `Scalar`.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsFloat, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
else:
    ProcessGroup = DeviceMesh = Any

Tree = TypeVar("Tree")

Scalar: TypeAlias = Any
"""A scalar array of the gradients' framework."""

Threshold: TypeAlias = SupportsFloat
"""A number, or a scalar array of any framework; it may be traced."""

Thresholds: TypeAlias = object
"""A `Threshold`, or a tree prefix of them; its containers may be of any type."""

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

AxisName: TypeAlias = Hashable
"""The name of a mesh axis, a tuple of names, or None."""


class HasDtype(Protocol):
    """An array of any framework."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> Any: ...


class HasGrad(Protocol):
    """A parameter: an object whose `.grad` is its gradient, an array or None."""

    @property
    def grad(self) -> Any: ...


class HasItemsize(Protocol):
    """A dtype of NumPy or PyTorch."""

    @property
    def itemsize(self) -> int: ...


Mask: TypeAlias = HasDtype | list[bool] | tuple[bool, ...] | None
"""Booleans, one for each example."""

Parameters: TypeAlias = HasGrad | Iterable[Any]
"""One parameter, or several: a list, a generator, named pairs, an optimizer's groups; or a tree of NumPy arrays."""

ProcessGroups: TypeAlias = ProcessGroup | Sequence[ProcessGroup] | None
Meshes: TypeAlias = DeviceMesh | Sequence[DeviceMesh] | None

WideDtype: TypeAlias = Literal["float32", "float64"] | type | HasItemsize
SumDtype: TypeAlias = WideDtype | Literal["float16", "bfloat16"]
Dtype: TypeAlias = str | type | HasItemsize
"""A dtype: its name, a type of NumPy or JAX, or a dtype object."""
