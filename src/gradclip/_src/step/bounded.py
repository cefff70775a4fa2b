"""Shorten what a step has changed in parameters, so that the bound holds for the numbers that are stored.

A parameter with n elements is `a` before the step and `b` after it. W is float32 for half types, else their own dtype,
u its unit roundoff, and C = max_rms * lr * sqrt(n) * (1 - 8u).

1. Each element of delta = fl(b - a) is off by a factor of at most 1 + u: a difference of two numbers of one format is
   exact where it is below the normal range.
2. Clipped to C, delta becomes y. Its norm, computed in exact arithmetic, is at most C, and |y| <= |delta|.
3. Where y = delta, b stays. There |b - a| <= (1 + u) |y|. The factor 1 - 8u covers this, and the rounding of C, of
   which three operations may be in W.
4. Elsewhere, s is a + y, rounded to nearest. If the exact |s - a| exceeds |y|, then |fl(s - a)| >= |y|, since y is in
   W. Then the number next to s, toward a, is stored. No number of the format lies strictly between s and it, and a + y
   does, or is s, so it lies from a to a + y.

So the exact norm of what is stored minus a is at most max_rms * lr * sqrt(n).
"""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from gradclip._src.inplace.layers import clip_grad_layer_norm_

_AT_ONCE = 2**20
"""Elements that are rewritten together: the rewriting makes several arrays of this size."""
_SURELY = 1.0 - 1e-5
"""A norm below this share of the threshold is sure to be kept."""


def shorten(
    parameters: Sequence[torch.Tensor], before: Sequence[torch.Tensor], rate: float | torch.Tensor, max_rms: float
) -> torch.Tensor:
    """Bound the update of each parameter; return the largest RMS of them before that, in units of the learning rate.

    `rate` is a tensor if it is on an accelerator, which is not waited for. An update that is not finite stays.
    """
    updates = [SimpleNamespace(grad=_wide(new) - _wide(old)) for new, old in zip(parameters, before, strict=True)]
    roots = [math.sqrt(update.grad.numel()) for update in updates]
    limits = [_limit(rate, max_rms * root, update.grad) for root, update in zip(roots, updates, strict=True)]
    norms: list[Any] = clip_grad_layer_norm_(updates, limits)
    on_host = all(norm.device.type == "cpu" for norm in norms) and not isinstance(rate, torch.Tensor)
    for new, old, update, norm, limit in zip(parameters, before, updates, norms, limits, strict=True):
        if not (on_host and float(norm) < limit * _SURELY):
            for one in zip(*map(_slices, (new, old, update.grad)), strict=True):
                _rewrite(*one)
    each = [norm.to(norms[0].device, torch.float32) for norm in torch._foreach_div(norms, roots)]
    largest = torch.stack(each).max()
    return torch.where(largest == 0, largest, largest / rate)


def _limit(rate: float | torch.Tensor, by: float, update: torch.Tensor) -> Any:
    """Return the threshold C for the norm of an update."""
    if by == math.inf:
        return by
    rate = rate.to(update.real.dtype) if isinstance(rate, torch.Tensor) else rate
    return rate * (by * (1.0 - 4.0 * torch.finfo(update.dtype).eps))  # eps is 2u


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _slices(values: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the local elements, real and imaginary parts beside each other, in slices along the first axis."""
    local = values.to_local() if isinstance(values, DTensor) else values
    local = torch.view_as_real(local) if local.is_complex() else local
    local = local.reshape(1) if local.dim() == 0 else local
    rows = max(1, _AT_ONCE * local.shape[0] // max(1, local.numel()))
    return local.split(rows)


def _rewrite(after: torch.Tensor, before: torch.Tensor, update: torch.Tensor) -> None:
    """Write into `after` the sum of `before` and `update`, rounded toward `before`, where the update was shortened."""
    start = _wide(before)
    shortened = update.abs() < (_wide(after) - start).abs()
    stored = (start + update).to(after.dtype)
    beyond = (_wide(stored) - start).abs() >= update.abs()
    stored = torch.where(beyond, torch.nextafter(stored, before), stored)
    after.copy_(torch.where(shortened, stored, after))
