"""Backends: the operations of one framework, behind one set of verbs.

A framework is touched only when one of its arrays arrives: it is found by the type of the array, among the modules
that are already imported.
"""

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from gradclip.backends.arrays import Arrays, check_dtypes
from gradclip.backends.formats import BFLOAT16, FLOAT64, Format, dtype_name
from gradclip.backends.host import HostArray
from gradclip.backends.protocols import Scope
from gradclip.backends.when_imported import when_imported

Array = Any

_FRAMEWORK_BY_TYPE: dict[type, str | None] = {}
_WHOLE = ("int", "uint", "qint", "quint")


class Backend(Protocol):
    """What the core asks of a framework. `portable.Portable` documents each operation."""

    xp: Any
    concrete: bool
    visible: bool
    splits_by_range: bool
    holders: Any
    wide: Format

    def precision(self) -> AbstractContextManager[Any]: ...
    def over(self, axis_name: Any) -> "Backend": ...
    def together(self, arrays: Sequence[Any]) -> Hashable | None: ...
    def stacked(self, scalars: Sequence[Array]) -> Array: ...
    def unstacked(self, vectors: Sequence[Array]) -> list[list[Array]]: ...
    def plain(self, leaves: Sequence[Any]) -> bool: ...
    def where_held(self, arrays: Arrays) -> Callable[..., Any] | None: ...
    def prepare(self, leaf: Any) -> Any: ...
    def patterns(self, leaves: Sequence[Any]) -> Sequence[Any]: ...
    def enter(self, prepared: Sequence[Any]) -> Arrays: ...
    def chosen(self, arrays: Arrays, indices: Sequence[int]) -> Arrays: ...
    def enter_in_place(self, leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> Arrays: ...
    def update(
        self, leaves: Sequence[Any], arrays: Arrays, new: Arrays, coefficient: Any, scope: Scope
    ) -> Sequence[Any]: ...
    def update_clamped(self, leaves: Sequence[Any], arrays: Arrays, bound: float) -> Sequence[Any]: ...
    def region(self, leaf: Any) -> Any: ...
    def collide(self, leaves: Sequence[Any], arrays: Arrays) -> bool: ...
    def writable(self, leaf: Any) -> bool: ...
    def can_write(self, leaves: Sequence[Any], arrays: Arrays) -> bool: ...
    def leave(self, array: Array, leaf: Any) -> Any: ...
    def leave_all(self, arrays: Sequence[Array], leaves: Sequence[Any]) -> list[Any]: ...
    def check_sum_dtype(self, dtype: str | None) -> None: ...
    def leave_sums(self, wides: Sequence[Array], arrays: Sequence[Array], dtype: str | None) -> list[Any]: ...
    def leave_scalar(self, value: Array, dtype: str, leaves: Sequence[Any]) -> Any: ...
    def leave_scalars(self, values: Array, dtype: str, leaves: Sequence[Any]) -> list[Any]: ...
    def leave_count(self, flags: Array, leaves: Sequence[Any]) -> Any: ...
    def with_care(self, compute: Callable[[], Any], arrays: Arrays, count: int) -> Any: ...
    def flushed_below(self, element: Format) -> float: ...
    def sum_error(self, count: int, arrays: Arrays, p: float, scope: Scope) -> float: ...
    def examples_sum_error(self, count: int) -> float: ...
    def scalar(self, value: Any, near: Sequence[Array]) -> Array: ...
    def single(self, value: Array) -> Array: ...
    def booleans(self, mask: Any) -> Array: ...
    def zeros(self, shape: tuple[int, ...], near: Sequence[Array]) -> Array: ...
    def gather(self, terms: Sequence[Array]) -> list[Array]: ...
    def total(self, terms: Sequence[Array]) -> Array: ...
    def power_sum(self, arrays: Arrays, p: float, scope: Scope, divisor: Array = None) -> Array: ...
    def scaled_power_sum(self, arrays: Arrays, p: float, scope: Scope) -> tuple[Array, Array]: ...
    def largest(self, arrays: Arrays, scope: Scope) -> Array: ...
    def smallest(self, arrays: Arrays, scope: Scope) -> Array: ...
    def quartered(self, arrays: Arrays) -> Arrays: ...
    def chosen_where(self, flags: Array, compute: Callable[[], Any], found: Any) -> Any: ...
    def count_nonfinite(self, x: Array) -> tuple[int, int]: ...
    def without_nonfinite(self, arrays: Arrays) -> Arrays: ...
    def parts(self, x: Array) -> list[Array]: ...
    def shrink(self, arrays: Arrays, coefficient: Any, scope: Scope) -> list[Array]: ...
    def shrink_each(self, arrays: Arrays, coefficients: Sequence[Any], scope: Scope) -> list[Array]: ...
    def add_examples(self, arrays: Arrays, weighing: Any, mask: Any) -> tuple[list[Array], Array] | None: ...
    def rounded_sum(self, x: Array, coefficient: Any) -> Array: ...
    def weighted_sum(self, x: Array, coefficient: Any) -> Array: ...
    def clamped_all(self, prepared: Sequence[Any], leaves: Sequence[Any], bound: Any) -> list[Any]: ...
    def differentiable(self, function: Callable[..., Any], rule: Any) -> Callable[..., Any]: ...


class Parts(Protocol):
    """What this process has of gradients of which several hold parts."""

    locals: Sequence[Any]

    def chosen(self, indices: Sequence[int]) -> "Parts":
        """Return those of the gradients at `indices`."""

    def whole(self, updated: Sequence[Any]) -> Sequence[Any]:
        """Return what stands in each `.grad` when this process's parts are `updated`."""


def any_distributed(leaves: Sequence[Any]) -> bool:
    """Say whether one of the leaves is a tensor that several processes hold."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(kind, module.DTensor) for kind in set(map(type, leaves)))


def whole_scalar(value: Any) -> Any:
    """Return a number or scalar array; of a distributed tensor, as PyTorch's norms are, the plain one it stands for."""
    return value.full_tensor() if any_distributed([value]) else value


def among_several() -> bool:
    """Say whether this process is one of several that PyTorch has made known to each other."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return False
    return bool(module.get_world_size() > 1)


def distributed() -> Any:
    """Return the module for what several processes hold."""
    from gradclip.backends import torch_distributed

    return torch_distributed


def find(leaves: Sequence[Any], names: Callable[[], Sequence[str]], *scalars: Any) -> Backend:
    """Return the backend for these leaves, and for the thresholds and masks that come with them.

    Raises TypeError where a leaf is no array of a supported framework, or leaves of two frameworks are mixed.
    """
    frameworks = _frameworks_of(leaves)
    if frameworks <= {"number", "numpy"} and "jax" in map(framework_of, scalars):
        frameworks.add("jax")
    if None in frameworks:
        at = [framework_of(leaf) for leaf in leaves].index(None)
        if is_masked(leaves[at]):
            raise TypeError(
                f"{names()[at] or 'the gradient'} is a masked array, of which the mask would be lost. Pass "
                "x.filled(0) to count masked elements as zeros, or x.data to count what lies under the mask."
            )
        raise TypeError(
            f"a leaf of gradients must be an array of NumPy, PyTorch or JAX, got {_shown(leaves[at])} at "
            f"{names()[at] or 'the root'}.{_instead_of(leaves[at])}"
        )
    frameworks -= {"number"}
    if "jax" in frameworks:
        frameworks -= {"numpy"}
    if len(frameworks) > 1:
        raise TypeError(
            f"one tree must hold arrays of one framework, got {' and '.join(sorted(map(str, frameworks)))}. "
            "Convert them, or clip them separately."
        )
    return _module_of(frameworks.pop() if frameworks else "numpy").backend(leaves, scalars)


def host_arrays(leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> list[HostArray]:
    """Return leaves as arrays in host memory, copied there only from devices; integers become float64, exactly.

    Raises TypeError for dtypes that no gradient has, and ValueError for integers that float64 does not hold.
    """
    known = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype") and not dtype_name(leaf).startswith(_WHOLE)]
    check_dtypes([leaves[i] for i in known], lambda: [names()[i] or "the tree" for i in known])
    arrays = list(map(_host_array, leaves))
    for index, x in enumerate(arrays):
        if x.data.dtype.kind in "iu" and x.dtype != BFLOAT16.name:
            if x.size and max(int(x.data.max()), -int(x.data.min())) > 2**FLOAT64.precision:
                raise ValueError(
                    f"{names()[index] or 'the tree'} holds integers beyond 2**53; convert them to float64."
                )
            arrays[index] = HostArray.of(x.data.astype(np.float64))
    check_dtypes(arrays, lambda: [name or "the tree" for name in names()])
    return arrays


def _host_array(leaf: Any) -> HostArray:
    if framework_of(leaf) == "torch":
        from gradclip.backends.torch_tensors import on_host

        return on_host(leaf)
    return HostArray.of(np.asarray(leaf))


def _shown(leaf: Any) -> str:
    text = " ".join(repr(leaf).split())
    return f"{text:.80} of type {type(leaf).__name__}"


def _instead_of(leaf: Any) -> str:
    """Return the advice in the error about a leaf that is no array."""
    if hasattr(leaf, "named_parameters"):
        return " Of a module pass the gradients, [p.grad for p in model.parameters()], or call gradclip.grad_norm."
    if isinstance(leaf, Mapping):
        return " Pass dict(...) of it."
    if hasattr(leaf, "to_numpy"):
        return " Pass its to_numpy()."
    return " Pass list(...) of it." if isinstance(leaf, Iterator | Set | range) else ""


def _module_of(framework: str | None) -> Any:
    if framework == "torch":
        from gradclip.backends import torch

        return torch
    if framework == "jax":
        from gradclip.backends import jax

        return jax
    from gradclip.backends import numpy

    return numpy


def framework_of(leaf: Any) -> str | None:
    """Return `numpy`, `torch`, `jax`, or `number` for a Python number; None for anything else."""
    kind = type(leaf)
    if kind not in _FRAMEWORK_BY_TYPE:
        _FRAMEWORK_BY_TYPE[kind] = _classify(leaf)
    return _FRAMEWORK_BY_TYPE[kind]


def all_of_frameworks(values: Sequence[Any]) -> bool:
    """Say whether all values belong to a framework, numbers too."""
    return None not in _frameworks_of(values)


def _frameworks_of(values: Sequence[Any]) -> set[str | None]:
    kinds = set(map(type, values))
    if not kinds <= _FRAMEWORK_BY_TYPE.keys():
        _FRAMEWORK_BY_TYPE.update({type(value): _classify(value) for value in values})
    return {_FRAMEWORK_BY_TYPE[kind] for kind in kinds}


def is_masked(value: Any) -> bool:
    """Say whether a value is one of NumPy's masked arrays."""
    return isinstance(value, np.ndarray) and hasattr(value, "mask")


def _classify(leaf: Any) -> str | None:
    if is_masked(leaf):
        return None
    if isinstance(leaf, (np.ndarray, np.generic)):
        return "numpy"
    if isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool):
        return "number"
    for framework, array in (("torch", "Tensor"), ("jax", "Array")):
        module = sys.modules.get(framework)
        if module is not None and isinstance(leaf, getattr(module, array)):
            return framework
    return None


def _make_kernels_known_to_jax() -> None:
    from gradclip.backends import jax_ffi

    jax_ffi.registered()


# Compiled programs can be read from files, and then nothing is traced before the kernels are called.
when_imported("jax", _make_kernels_known_to_jax)
