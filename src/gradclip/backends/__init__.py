"""Backends: the operations of one framework, behind one set of verbs. `registry` finds that of an array."""

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from gradclip.backends.protocols import Backend as Backend
from gradclip.backends.values import Axes as Axes


class Shards(Protocol):
    """What this process has of gradients that may be distributed tensors."""

    @property
    def locals(self) -> Sequence[Any]:
        """What lies here of each gradient: a shard, or all of a plain tensor."""

    def chosen(self, indices: Sequence[int]) -> "Shards":
        """Return those of the gradients at `indices`."""

    def whole(self, updated: Sequence[Any]) -> Sequence[Any]:
        """Return what stands in each `.grad` when this process's shards are `updated`."""


def any_distributed(leaves: Sequence[Any]) -> bool:
    """Say whether one of the leaves is a tensor that several processes hold."""
    # Importing it takes most of a second. Where nobody has imported it, nobody has such a tensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(kind, module.DTensor) for kind in set(map(type, leaves)))


def whole_scalar(value: Any) -> Any:
    """Return a number or scalar array as it is, and a distributed tensor, as PyTorch's norms may be, as a plain one."""
    return value.full_tensor() if type(value) is not float and any_distributed([value]) else value


def among_several() -> bool:
    """Say whether this process is one of several that PyTorch has made known to each other."""
    module = sys.modules.get("torch.distributed")
    # PyTorch may have been built without it. The module is there then, but `is_initialized` is not.
    if module is None or not module.is_available() or not module.is_initialized():
        return False
    return bool(module.get_world_size() > 1)


def shards_of(gradients: Sequence[Any], parameters: Sequence[Any]) -> Shards:
    """Return what this process has of the gradients of parameters. Some of the gradients are distributed tensors."""
    # Imported late: programs without distributed tensors must not wait for their module.
    from gradclip.backends.torch import distributed

    return distributed.shards_of(gradients, parameters)
