"""Attention: its own code, whose operations report themselves, and one call for a whole batch.

`torch.func.vmap` calls `scaled_dot_product_attention` for one example after another on some devices. As it treats the
examples of a batch alone anyway, one call does for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from gradclip._src.private.ghost.torch.parameter import UNKNOWN, Arguments, Keywords, Operation, with_copies
from gradclip._src.private.ghost.torch.run import ForwardPass
from gradclip._src.private.ghost.torch.vmap import current_level, hooks_are_set


@lru_cache
def own_code(func: FunctionType) -> Operation:
    """Return a function that does not hand itself over: the same code, which finds no tensor of a special kind.

    So its operations report themselves one by one.
    """
    hands_over = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**func.__globals__, **dict.fromkeys(hands_over, _never)}
    made = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def _never(*tensors: object) -> bool:
    return False


class AttentionAtOnce(TorchFunctionMode):
    """Within it, `scaled_dot_product_attention` of one example is computed for the whole batch."""

    def __init__(self, run: ForwardPass) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(
        self, func: Operation, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if hooks_are_set():
            self.run.hooked = True
        if func is F.multi_head_attention_forward:
            with self:
                return own_code(func)(*args, **kwargs)
        if func is F.scaled_dot_product_attention and current_level() == self.run.level:
            args, kwargs = with_copies(func, args, kwargs)
            made = self._attention(*args, **kwargs)
            if made is not UNKNOWN:
                return made
        return func(*args, **kwargs)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        tensors = [query, key, value]
        masks = [] if attn_mask is None else [attn_mask]
        # Dropout must be drawn for each example.
        if dropout_p or {type(x) for x in (*tensors, *masks)} != {torch.Tensor}:
            return UNKNOWN
        if {x.dim() for x in tensors} not in ({3}, {4}) or any(x.dim() > query.dim() for x in masks):
            return UNKNOWN
        masks = [self._spread(x, query.shape[:-3]) for x in masks]
        # The fast kernels want four axes.
        q, k, v = (self.run.batch(x).flatten(0, -4) for x in tensors)
        mask = masks[0] if masks else None
        made = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        return self.run.one(made.reshape(self.run.count, *query.shape[:-3], *made.shape[1:]))

    def _spread(self, mask: torch.Tensor, outer: Sequence[int]) -> torch.Tensor:
        """Return the mask of all examples with four axes."""
        batch = self.run.batch(mask)
        batch = batch.reshape(self.run.count, *(1,) * (len(outer) + 3 - mask.dim()), *mask.shape)
        return batch.expand(self.run.count, *outer, *batch.shape[-3:]).flatten(0, -4)
