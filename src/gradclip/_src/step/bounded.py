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

from gradclip._src import look
from gradclip._src.core.norms import EUCLIDEAN
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.inplace.layers import clip_grad_layer_norm_

_AT_ONCE = 2**20
"""Elements that are rewritten together: the rewriting makes several arrays of this size."""
_IN_CACHE = 2**17
"""Elements of an update that are measured together, if it has more."""
_LOST = 1e-150
"""More than the norm of elements whose squares are 0 in float64, however many they are."""
_SURELY = 1.0 - 1e-5
"""A norm below this share of the threshold is sure to be kept."""


def shorten(
    parameters: Sequence[torch.Tensor], before: Sequence[torch.Tensor], rate: float | torch.Tensor, max_rms: float
) -> torch.Tensor:
    """Bound the update of each parameter; return the largest RMS of them before that, in units of the learning rate.

    `rate` is a tensor if it is on an accelerator, which is not waited for. An update that is not finite stays.
    """
    kept = [_rms_if_kept(*pair, rate, max_rms) for pair in zip(parameters, before, strict=True)]
    found = [torch.tensor(rms, dtype=torch.float32) for rms in kept if rms is not None]
    rest = [place for place, rms in enumerate(kept) if rms is None]
    if rest:
        found.append(_shorten([parameters[place] for place in rest], [before[place] for place in rest], rate, max_rms))
    return torch.stack([one.to(found[-1].device) for one in found]).max()


@with_subnormals
def _rms_if_kept(after: torch.Tensor, before: torch.Tensor, rate: float | torch.Tensor, max_rms: float) -> float | None:
    """Return the RMS of a large update in host memory that is surely kept, in units of the learning rate; else None.

    It is measured in pieces that stay in the processor's cache: whole updates would need new memory.
    """
    on_host = after.device.type == "cpu" and not isinstance(rate, torch.Tensor) and not isinstance(after, DTensor)
    if not on_host or after.numel() <= _IN_CACHE:
        return None
    norm = 0.0
    for new, old in zip(*(_slices(each, _IN_CACHE) for each in (after, before)), strict=True):
        norm = math.hypot(norm, _norm(_wide(new) - _wide(old)))
    root = math.sqrt(after.numel())
    return norm / root / rate if norm + _LOST < max_rms * rate * root * _SURELY else None


def _norm(update: torch.Tensor) -> float:
    seen = look.read([update])
    found = seen.measured(EUCLIDEAN) if seen else None
    return found[0] if found else float(torch.linalg.vector_norm(update, dtype=torch.float64))


def _shorten(
    parameters: Sequence[torch.Tensor], before: Sequence[torch.Tensor], rate: float | torch.Tensor, max_rms: float
) -> torch.Tensor:
    updates = [SimpleNamespace(grad=_wide(new) - _wide(old)) for new, old in zip(parameters, before, strict=True)]
    roots = [math.sqrt(update.grad.numel()) for update in updates]
    limits = [_limit(rate, max_rms * root, update.grad) for root, update in zip(roots, updates, strict=True)]
    norms: list[Any] = clip_grad_layer_norm_(updates, limits)
    on_host = all(norm.device.type == "cpu" for norm in norms) and not isinstance(rate, torch.Tensor)
    for new, old, update, norm, limit in zip(parameters, before, updates, norms, limits, strict=True):
        if not (on_host and float(norm) < limit * _SURELY):
            for one in zip(*(_slices(each, _AT_ONCE) for each in (new, old, update.grad)), strict=True):
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


def _slices(values: torch.Tensor, at_once: int) -> Sequence[torch.Tensor]:
    """Return the local elements, real and imaginary parts beside each other, in slices along the first axis."""
    local = values.to_local() if isinstance(values, DTensor) else values
    local = torch.view_as_real(local) if local.is_complex() else local
    local = local.reshape(1) if local.dim() == 0 else local
    rows = max(1, at_once * local.shape[0] // max(1, local.numel()))
    return local.split(rows)


def _rewrite(after: torch.Tensor, before: torch.Tensor, update: torch.Tensor) -> None:
    """Write into `after` the sum of `before` and `update`, rounded toward `before`, where the update was shortened."""
    start = _wide(before)
    shortened = update.abs() < (_wide(after) - start).abs()
    stored = (start + update).to(after.dtype)
    beyond = (_wide(stored) - start).abs() >= update.abs()
    stored = torch.where(beyond, torch.nextafter(stored, before), stored)
    after.copy_(torch.where(shortened, stored, after))
