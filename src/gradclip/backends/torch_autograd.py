"""The derivative of clipping for PyTorch's autograd."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from array_api_compat import torch as namespace


class _Clip(torch.autograd.Function):
    """A function from leaves to clipped leaves and a norm, with the derivative of a `ClipRule`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: Callable[..., Any], rule: Any, *leaves: torch.Tensor) -> Any:
        clipped, norm = function(leaves, None)
        return (*clipped, norm)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.rule = inputs[1]
        ctx.save_for_backward(*inputs[2:], output[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        *leaves, norm = ctx.saved_tensors
        gys = grads[:-1] or [torch.zeros_like(leaf) for leaf in leaves]
        return None, None, *ctx.rule.vjp(namespace, leaves, norm, gys, grads[-1])


def call_differentiably(
    function: Callable[..., Any], rule: Any, leaves: Sequence[Any], max_norm: Any
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Call `function`, with the derivative of `rule` where a leaf asks for one."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return function(leaves, max_norm)
    if max_norm is not None:
        rule = replace(rule, max_norm=max_norm.detach())

    def without_threshold(leaves: Sequence[Any], _: None) -> Any:
        return function(leaves, max_norm)

    *clipped, norm = _Clip.apply(without_threshold, rule, *leaves)
    return clipped, norm
