"""PyTorch's fused optimizers, which divide gradients as they read them, and the state their steps leave behind."""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from gradclip._src.backends import any_distributed, shards_of

_DEPTH = 16  # of frames from a hook to who calls the step
_DIVIDES = "_step_supports_amp_scaling"
OF_SCALER = ("grad_scale", "found_inf")
"""The attributes that a GradScaler gives an optimizer for one step."""


def check_fused(optimizer: object) -> None:
    """Raise if an optimizer cannot divide gradients as it reads them: TypeError for its class, else ValueError."""
    if not isinstance(optimizer, Adam | AdamW | SGD | Adagrad):
        raise TypeError(
            "clipping can be folded only into Adam, AdamW, SGD and Adagrad of torch.optim, got "
            f"{type(optimizer).__name__}. Call gradclip.clip_grad_norm_(model.parameters(), ...) before its step()."
        )
    if inspect.unwrap(type(optimizer).step) not in [inspect.unwrap(kind.step) for kind in (Adam, AdamW, SGD, Adagrad)]:
        raise TypeError(
            f"{type(optimizer).__name__} has its own step method, which may not divide gradients as PyTorch's does. "
            "Call gradclip.clip_grad_norm_(model.parameters(), ...) before its step()."
        )
    if not all(group.get("fused") for group in optimizer.param_groups):
        raise ValueError(
            f"this {type(optimizer).__name__} was not created with fused=True for all of its parameter groups, so its "
            f"step cannot clip. Create it as {type(optimizer).__name__}(..., fused=True), or call "
            "gradclip.clip_grad_norm_(model.parameters(), ...) before its step()."
        )


def check_listed_once(optimizer: Optimizer) -> None:
    """Raise a ValueError if a parameter is listed twice: fused kernels would divide its gradient twice."""
    for number, group in enumerate(optimizer.param_groups):
        if len(set(map(id, group["params"]))) < len(group["params"]):
            raise ValueError(
                f"parameter group {number} lists a parameter twice, and a fused {type(optimizer).__name__} divides "
                "its gradient twice. List each parameter once, or call gradclip.clip_grad_norm_ before its step()."
            )


def forget_scaler(optimizer: Optimizer) -> None:
    """Remove what a GradScaler has set, after an error.

    It does not, and its next step would multiply its scale by what it finds.
    """
    if "found_inf" in vars(optimizer):
        for name in OF_SCALER:
            vars(optimizer).pop(name, None)


def makes_state(optimizer: Optimizer) -> bool:
    """Say whether `torch.distributed.checkpoint` steps the optimizer with gradients of zero, to make its state."""
    if optimizer.state:
        return False
    frame, deep = sys._getframe(1), 0
    while frame.f_back is not None and deep < _DEPTH:
        if frame.f_code.co_name == "_init_optim_state":
            return True
        frame, deep = frame.f_back, deep + 1
    return False


def lay_out_gradients(optimizer: Optimizer) -> None:
    """Replace gradients that do not lie in memory as their parameters do, such as expanded ones.

    Fused kernels go through the memory of a parameter and of its gradient side by side.
    """
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        grad = parameter.grad
        if grad is None or grad.layout is not torch.strided:
            continue
        if type(grad) is torch.Tensor:
            laid_out = _laid_out_like(parameter, grad)
            if laid_out is not grad:
                parameter.grad = laid_out
        elif any_distributed([grad]) and grad.placements == getattr(parameter, "placements", None):
            _lay_out_shard(parameter, grad)  # PyTorch makes new memory for other placements


def _lay_out_shard(parameter: Any, grad: Any) -> None:
    around, (shard,) = shards_of([parameter], [parameter]), shards_of([grad], [parameter]).locals
    laid_out = _laid_out_like(around.locals[0], shard)
    if laid_out is not shard:
        (parameter.grad,) = around.whole([laid_out])


def _laid_out_like(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if (grad.is_contiguous() and parameter.is_contiguous()) or grad.stride() == parameter.stride():
        return grad
    return torch.empty_like(parameter, dtype=grad.dtype, requires_grad=False).copy_(grad)


def without_momentum(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters whose momentum the next step will create."""
    if not isinstance(optimizer, SGD):
        return []
    each = (p for group in optimizer.param_groups if group["momentum"] for p in group["params"])
    return [p for p in each if p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None]


def clear_momentum(optimizer: Optimizer, parameters: Sequence[torch.Tensor], skipped: torch.Tensor) -> None:
    """Zero the momentum created by a first step that was skipped: its memory is uninitialized.

    For PyTorch the next step is not a first one, so dampening (if any) applies to it.
    """
    for parameter in parameters:
        momentum = optimizer.state[parameter]["momentum_buffer"]
        momentum.masked_fill_(skipped.to(momentum.device), 0.0)


def with_memory_of_its_own(parameter: torch.Tensor) -> None:
    """Copy a gradient if the backward pass may still read its memory, or another gradient shares it.

    PyTorch does not copy gradients that it can keep. Such a gradient may be a view of what other parameters also
    received.
    """
    grad = parameter.grad
    if grad is not None and not _owns_its_memory(grad):
        parameter.grad = grad.clone()


def _owns_its_memory(grad: torch.Tensor) -> bool:
    """Say whether nothing else can read the memory of a gradient."""
    # Sparse, distributed and other tensors hold tensors, which others may hold too. Nothing counts those holders.
    if grad.layout is not torch.strided or type(grad) is not torch.Tensor:
        return False
    # One use is the gradient itself, the other is the storage object asked here.
    return torch._C._storage_Use_Count(grad.untyped_storage()._cdata) <= 2


class Guard:
    """Wraps a step so that the optimizer's attributes are restored if it fails. Post-step hooks run only on success.

    It also marks the optimizer for GradScaler as one whose step divides gradients. PyTorch marks it when it is created,
    but not a copy.
    """

    def __init__(self, optimizer: Optimizer, restore: Callable[[Optimizer], None]) -> None:
        self._before = vars(optimizer).get("step")
        self._unmarked = not getattr(optimizer, _DIVIDES, False)
        setattr(optimizer, _DIVIDES, True)

        # Compiled code would treat the divisor as a constant.
        @torch.compiler.disable
        @functools.wraps(optimizer.step)
        def step(optimizer: Optimizer, *args: object, **kwargs: object) -> Any:
            try:
                if self._before is not None:
                    return self._before(*args, **kwargs)
                return type(optimizer).step(optimizer, *args, **kwargs)
            except BaseException:
                restore(optimizer)
                raise

        # A method, like the original: learning-rate schedulers access its `__func__`.
        self._step = types.MethodType(step, optimizer)
        optimizer.step = self._step

    def remove(self, optimizer: Optimizer) -> None:
        """Restore the original step. If a scheduler has wrapped this one since, it stays inside and does nothing."""
        if self._unmarked:
            vars(optimizer).pop(_DIVIDES, None)
        if vars(optimizer).get("step") is not self._step:
            return
        del optimizer.step
        if self._before is not None:
            optimizer.step = self._before
