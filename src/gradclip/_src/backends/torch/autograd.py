"""The derivative of clipping for PyTorch: reverse and forward mode, in autograd and `torch.func`, also nested."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from array_api_compat import torch as namespace
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx


class _Reverse(torch.autograd.Function):
    """Calls a function that returns results, a norm and counts, and differentiates it by the rule of a `ClipRule`.

    Its outputs are the norm (if the rule measures one), the results, and the counts, which are integers.
    """

    generate_vmap_rule = True  # required by `vmap`; both directions use only operations that it supports

    @staticmethod
    def forward(
        function: Callable[..., Any],
        rule: Any,
        max_norm: torch.Tensor | None,
        mask: torch.Tensor | None,
        *leaves: torch.Tensor,
    ) -> Any:
        results, norm, counts = function(leaves, max_norm, mask)
        return (*([norm] if rule.measures else []), *results, *counts)

    # Separate from `forward`, because `torch.func` requires that.
    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.rule = inputs[1]
        norm, results, counts = _taken_apart(ctx.rule, output)
        ctx.dtypes, ctx.counts = [result.dtype for result in results], len(counts)
        # Saved, not set as attributes: attributes would keep the graph alive and hide in-place changes of the tensors.
        ctx.save_for_backward(norm, *inputs[2:])

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> Any:
        gnorm, *gys = _with_norm(ctx.rule, grads)
        gxs, gmax = ctx.rule.vjp(namespace, _place(ctx), gys[: len(ctx.dtypes)], gnorm)
        max_norm = ctx.saved_tensors[1]
        # One gradient for each argument of `forward`: the function, the rule and the mask have none.
        return None, None, None if max_norm is None else gmax.to(max_norm), None, *gxs


class _Both(_Reverse):
    """The same with a forward-mode rule, which `torch.compile` does not support."""

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        _Reverse.setup_context(ctx, inputs, output)
        ctx.save_for_forward(_with_norm(inputs[1], output)[0], *inputs[2:])

    @staticmethod
    def jvp(
        ctx: FunctionCtx, _function: None, _rule: None, change: torch.Tensor | None, _mask: None, *changes: torch.Tensor
    ) -> Any:
        change = 0.0 if change is None else change
        # PyTorch turns forward mode off here. Without it, an outer forward-mode derivative would be zero.
        with forward_ad._set_fwd_grad_enabled(True):
            place = _place(ctx, _primal)
            dys, dnorm = ctx.rule.jvp(namespace, place, changes, change, ctx.dtypes)
        return (*([dnorm] if ctx.rule.measures else []), *dys, *[None] * ctx.counts)


def _place(ctx: FunctionCtx, of: Callable[[Any], Any] = lambda x: x) -> Any:
    norm, max_norm, mask, *leaves = map(of, ctx.saved_tensors)
    return ctx.rule.at(leaves, norm, max_norm, mask)


def _primal(x: torch.Tensor | None) -> Any:
    """Return a tensor without its innermost forward-mode tangent, also under `vmap`, which has no rule for that."""
    if x is None:
        return None
    functorch = torch._C._functorch
    if functorch.is_batchedtensor(x):
        inner = _primal(functorch.get_unwrapped(x))
        return functorch._add_batch_dim(inner, functorch.maybe_get_bdim(x), functorch.maybe_get_level(x))
    return forward_ad.unpack_dual(x).primal


def _with_norm(rule: Any, outputs: Sequence[Any]) -> Sequence[Any]:
    """Return one value for each output, with None first if there is no norm."""
    return outputs if rule.measures else (None, *outputs)


def _taken_apart(rule: Any, outputs: Sequence[Any]) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """Return the norm, the results and the counts."""
    norm, *others = _with_norm(rule, outputs)
    results = [other for other in others if other.is_floating_point() or other.is_complex()]
    return norm, results, others[len(results) :]


def call_differentiably(
    function: Callable[..., Any],
    rule: Any,
    leaves: Sequence[torch.Tensor],
    max_norm: torch.Tensor | None,
    mask: np.ndarray | torch.Tensor | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    """Call `function`, with the derivative of `rule` if a derivative may be needed."""
    given = leaves if max_norm is None else [*leaves, max_norm]
    # Calling a Function takes longer than clipping small gradients, so use it only when needed.
    if not (given and asked(given)):
        return function(leaves, max_norm, mask)
    # `torch.compile` does not support forward mode.
    rules = _Reverse if torch.compiler.is_compiling() else _Both
    call = function
    if isinstance(mask, np.ndarray):
        # A Function saves only tensors, but the host's code needs the mask as a NumPy array.
        known, mask = mask, torch.from_numpy(mask)
        call = lambda leaves, max_norm, _: function(leaves, max_norm, known)  # noqa: E731
    norm, results, counts = _taken_apart(rule, rules.apply(call, rule, max_norm, mask, *leaves))
    return results, norm, counts


def asked(tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether a derivative may be needed: by autograd, forward mode, or a transform of `torch.func`."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    if torch.compiler.is_compiling():
        return False
    # There is no public API for either.
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
