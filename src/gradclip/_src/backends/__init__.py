"""Backends: one set of operations for each framework. `registry` finds the backend for an array."""

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Shards(Protocol):
    """The part of each gradient that this process holds, when gradients may be distributed tensors."""

    @property
    def locals(self) -> Sequence[Any]:
        """This process's part of each gradient: a shard, or all of a plain tensor."""

    def chosen(self, indices: Sequence[int]) -> "Shards":
        """Return the shards of the gradients at `indices`."""

    def whole(self, updated: Sequence[Any]) -> Sequence[Any]:
        """Return the new value of each `.grad` when this process's shards become `updated`."""


USUAL: set[type] = {np.ndarray}
"""Types of arrays that hold their values themselves. A framework adds its own when it is loaded."""


def any_distributed(leaves: Sequence[Any]) -> bool:
    """Say whether any leaf is a distributed tensor."""
    # Importing this module takes most of a second. If nobody has imported it, there are no distributed tensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(kind, module.DTensor) for kind in set(map(type, leaves)))


def whole_scalar(value: Any) -> Any:
    """Return a number or scalar as it is, but a distributed tensor (PyTorch's norms can be one) as a plain tensor."""
    return value.full_tensor() if type(value) is not float and any_distributed([value]) else value


def among_several() -> bool:
    """Say whether PyTorch has initialized communication with other processes."""
    module = sys.modules.get("torch.distributed")
    # PyTorch may be built without it. Then the module exists, but `is_initialized` does not.
    if module is None or not module.is_available() or not module.is_initialized():
        return False
    return bool(module.get_world_size() > 1)


def shards_of(gradients: Sequence[Any], parameters: Sequence[Any]) -> Shards:
    """Return this process's part of each parameter's gradient, when some gradients are distributed tensors."""
    # Imported late, so that programs without distributed tensors do not pay for the import.
    from gradclip._src.backends.torch import distributed

    return distributed.shards_of(gradients, parameters)


def shards_like(tensors: Sequence[Any], others: Sequence[Any]) -> Sequence[Any]:
    """Return this process's part of distributed tensors, each laid out like the other tensor beside it."""
    from gradclip._src.backends.torch import distributed

    return distributed.shards_like(tensors, others)


def norms_like(norms: Sequence[Any], tensors: Sequence[Any], own: Sequence[Sequence[int]]) -> list[Any]:
    """Return the norms of units, as distributed tensors where a process has only some units of a tensor.

    `own` are the axes of each tensor that index its units.
    """
    from gradclip._src.backends.torch import distributed

    return list(map(distributed.norms_like, norms, tensors, own))
