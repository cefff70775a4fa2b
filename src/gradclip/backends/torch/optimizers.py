"""Fused optimizers of PyTorch: those that divide gradients as they read them, and what a step of theirs leaves."""

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer


def check_fused(optimizer: object) -> None:
    """Raise where an optimizer does not divide gradients as it reads them: TypeError for its class, else ValueError."""
    if not isinstance(optimizer, Adam | AdamW | SGD | Adagrad):
        raise TypeError(
            "clipping can be folded into Adam, AdamW, SGD and Adagrad of torch.optim, got "
            f"{type(optimizer).__name__}. Call gradclip.clip_grad_norm_(model.parameters(), ...) before its step()."
        )
    if inspect.unwrap(type(optimizer).step) not in [inspect.unwrap(kind.step) for kind in (Adam, AdamW, SGD, Adagrad)]:
        raise TypeError(
            f"{type(optimizer).__name__} has a step of its own, which need not divide gradients as PyTorch's does. "
            "Call gradclip.clip_grad_norm_(model.parameters(), ...) before its step()."
        )
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    if not (fused and all(group.get("fused") for group in optimizer.param_groups)):
        raise ValueError(
            f"this {type(optimizer).__name__} was not made with fused=True for all of its parameter groups, so its "
            f"step cannot clip. Make it {type(optimizer).__name__}(..., fused=True), or call "
            "gradclip.clip_grad_norm_(model.parameters(), ...) before its step()."
        )


def without_momentum(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters whose momentum the coming step would make."""
    if not isinstance(optimizer, SGD):
        return []
    each = (p for group in optimizer.param_groups if group["momentum"] for p in group["params"])
    return [p for p in each if p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None]


def clear_momentum(optimizer: Optimizer, parameters: Sequence[torch.Tensor], skipped: torch.Tensor) -> None:
    """Clear the momentum that a first step has made where that was skipped: it is memory as it was found.

    The step that follows is no first one to PyTorch, so that dampening, if there is any, counts in it.
    """
    for parameter in parameters:
        momentum = optimizer.state[parameter]["momentum_buffer"]
        momentum.masked_fill_(skipped.to(momentum.device), 0.0)


def with_memory_of_its_own(parameter: torch.Tensor) -> None:
    """Replace a gradient by a copy where the backward pass may still read its memory, or another gradient lies there.

    PyTorch does not copy a gradient that it can keep: it may be a view of what it hands to other parameters, too.
    """
    grad = parameter.grad
    if grad is None or grad.layout is not torch.strided or type(grad) is not torch.Tensor:
        return
    # One use is that of the gradient itself, one that of the object that asks here.
    if torch._C._storage_Use_Count(grad.untyped_storage()._cdata) > 2:
        parameter.grad = grad.clone()


class Guard:
    """A step that puts the attributes back where it fails; hooks after a step run only where it does not."""

    def __init__(self, optimizer: Optimizer, restore: Callable[[Optimizer], None]) -> None:
        self._before = vars(optimizer).get("step")

        # Compiled code would take the divisor for what it was when it was compiled.
        @torch.compiler.disable
        @functools.wraps(optimizer.step)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                if self._before is not None:
                    return self._before(*args, **kwargs)
                return type(optimizer).step(optimizer, *args, **kwargs)
            except BaseException:
                restore(optimizer)
                raise

        # A method, as what it replaces: schedulers of learning rates ask for its `__func__`.
        self._step = types.MethodType(step, optimizer)
        optimizer.step = self._step

    def remove(self, optimizer: Optimizer) -> None:
        """Put back what was replaced. Where a scheduler has wrapped it since, it stays within that and does nothing."""
        if vars(optimizer).get("step") is not self._step:
            return
        del optimizer.step
        if self._before is not None:
            optimizer.step = self._before
