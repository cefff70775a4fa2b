"""Tensors inside and outside of `torch.func.vmap`: the whole batch behind the tensor of one example, and back."""

from __future__ import annotations

import torch
from torch._C import _functorch

# The documented way, an `autograd.Function` with a `vmap` rule, takes 20 times as long: 168 us an operation against 7.
_NEEDED = (
    "maybe_current_level",
    "maybe_get_level",
    "is_batchedtensor",
    "maybe_get_bdim",
    "get_unwrapped",
    "_add_batch_dim",
)


def available() -> bool:
    """Say whether this PyTorch has what this module needs."""
    hooks = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    return hooks and all(hasattr(_functorch, name) for name in _NEEDED)


def current_level() -> int | None:
    """Return the number of the innermost transform of `torch.func` that is being traced, None outside of all."""
    return _functorch.maybe_current_level()


def is_of_example(x: torch.Tensor, level: int) -> bool:
    """Say whether each example has a tensor of its own."""
    return _functorch.maybe_get_level(x) == level and _functorch.is_batchedtensor(x)


def batch_of(x: torch.Tensor, level: int, count: int) -> torch.Tensor:
    """Return the tensors of all examples, with the batch on axis 0; expanded if they are all the same."""
    if not is_of_example(x, level):
        return x.expand(count, *x.shape)
    axis = _functorch.maybe_get_bdim(x)
    whole = _functorch.get_unwrapped(x)
    return whole if axis == 0 else whole.movedim(axis, 0)


def one_of(batch: torch.Tensor, level: int) -> torch.Tensor:
    """Return the tensor of one example, given those of all with the batch on axis 0."""
    return _functorch._add_batch_dim(batch, 0, level)


def memory_of(x: torch.Tensor) -> int:
    """Return the address of a tensor, or of the tensor of all examples behind it."""
    return (_functorch.get_unwrapped(x) if _functorch.is_batchedtensor(x) else x).data_ptr()


def hooks_are_set() -> bool:
    """Say whether tensors saved for the backward pass go through hooks, as checkpointing uses them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
