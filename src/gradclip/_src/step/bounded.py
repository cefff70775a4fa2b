"""Shorten what a step has changed in parameters, so that the bound holds for the numbers that are stored.

A parameter with n elements is `a` before the step and `b` after it. W is float32 for half types, else their own dtype,
u float32's unit roundoff, and C = max_rms * lr * sqrt(n) * (1 - 8u).

1. Each element of delta = fl(b - a) is off by a factor of at most 1 + u: a difference of two numbers of one format is
   exact where it is below the normal range.
2. Clipped to C, delta becomes y. Its norm, computed in exact arithmetic, is at most C, and |y| <= |delta|.
3. Where b stays, y = delta, or the norm of delta is at most C. There |b - a| <= (1 + u) |delta|. The factor 1 - 8u
   covers this, and the rounding of C, of which three operations may be in W.
4. Elsewhere, s is a + y, rounded to nearest. If the exact |s - a| exceeds |y|, then |fl(s - a)| >= |y|, since y is in
   W. Then the number next to s, toward a, is stored. No number of the format lies strictly between s and it, and a + y
   does, or is s, so it lies from a to a + y.

So the exact norm of what is stored minus a is at most max_rms * lr * sqrt(n).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from gradclip._src import look
from gradclip._src.backends.host.laid import kind_of
from gradclip._src.core.norms import EUCLIDEAN
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.inplace.layers import clip_grad_layer_norm_
from gradclip._src.inplace.norm import clip_grads_with_norm_

_Pair = tuple[torch.Tensor, torch.Tensor]  # after and before
_Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # after, before and update
_AT_ONCE = 2**24
"""Elements that are rewritten together on an accelerator: the rewriting makes several arrays of this size."""
_IN_CACHE = 2**17
"""The same on the host, where arrays that stay in the processor's cache take far less time."""
_SMALL = 2**13
"""Elements of parameters that are measured together there."""
_LOWERED = 1.0 - 4.0 * torch.finfo(torch.float32).eps  # eps is 2u
_SURELY = 1.0 - 9e-6
"""A norm below this share of the threshold is sure to be kept. So is one below 0.99999 of the bound."""
_NORM_IS_AT_MOST = 1.0 + 1e-9
"""What is found for a norm, times this, is no smaller than the norm."""


def shorten(
    parameters: Sequence[torch.Tensor], before: Sequence[torch.Tensor], rate: float | torch.Tensor, max_rms: float
) -> torch.Tensor:
    """Bound the update of each parameter; return the largest RMS of them before that, in units of the learning rate.

    `rate` is a tensor if it is on an accelerator, which is not waited for. An update that is not finite stays.
    """
    here: list[_Pair] = []
    others: list[_Pair] = []
    for new, old in zip(parameters, before, strict=True):
        elsewhere = isinstance(rate, torch.Tensor) or new.device.type != "cpu" or isinstance(new, DTensor)
        (others if elsewhere else here).append((new, old))
    found: list[torch.Tensor] = []
    if here:
        each = _shorten_on_host(here, float(rate), max_rms)
        found.append(torch.tensor(each, dtype=torch.float32, device="cpu").max())
    if others:
        found.append(_shorten_without_waiting(others, rate, max_rms))
    return torch.stack([one.to(found[-1].device) for one in found]).max()


@with_subnormals
def _shorten_on_host(pairs: Sequence[_Pair], rate: float, max_rms: float) -> list[float]:
    """Bound updates, and return what `shorten` returns of each."""
    room: list[torch.Tensor] = []
    found: list[float] = []
    for (new, old), known in zip(pairs, _norms_of_small(pairs), strict=True):
        root = math.sqrt(new.numel())
        limit = rate * (max_rms * root * _LOWERED) if max_rms < math.inf else math.inf
        norm = known if known < limit * _SURELY else _shorten_one(new, old, limit, room)
        if math.isinf(norm):  # that of finite numbers may be, too
            found.append(float(_shorten_without_waiting([(new, old)], rate, max_rms)))
        else:
            found.append(math.inf if norm and not rate else norm / root / (rate or 1.0))
    return found


def _norms_of_small(pairs: Sequence[_Pair]) -> list[float]:
    """Return the norms of small updates, measured together; NaN for others."""
    found = [math.nan] * len(pairs)
    plain = [type(new) is torch.Tensor and not new.is_complex() for new, _ in pairs]
    small = [place for place, (new, _) in enumerate(pairs) if plain[place] and new.numel() <= _SMALL]
    changes = torch._foreach_sub(*([_wide(pairs[place][i]) for place in small] for i in (0, 1))) if small else []
    seen = look.read(changes)
    sums: list[float] = []
    if seen and seen.measured(EUCLIDEAN, sums):
        enough = kind_of(tuple(seen.kernels.dtypes)).enough
        for place, total in zip(small, sums, strict=True):
            found[place] = math.sqrt(total) if total > enough else math.nan
    return found


def _shorten_one(after: torch.Tensor, before: torch.Tensor, limit: float, room: list[torch.Tensor]) -> float:
    """Bound one update, in pieces, unless its norm is beyond the range; return the norm. `room` is used again."""
    order = sorted(range(after.dim()), key=after.stride, reverse=True)  # as they lie in memory, such as channels last
    pieces = list(zip(*(_slices(one.permute(order), _IN_CACHE) for one in (after, before)), strict=True))
    norm = math.hypot(*(_norm(_change(new, old, room)) for new, old in pieces))
    if math.isfinite(norm) and not norm < limit * _SURELY:
        for new, old in pieces:
            update, known = _change(new, old, room), norm * _NORM_IS_AT_MOST
            seen = look.read([update])
            if not (seen and seen.clip_by_known_(known, limit)):
                clip_grads_with_norm_([SimpleNamespace(grad=update)], limit, known)
            new.copy_(_sum_toward(old, update, into=new if type(new) is torch.Tensor else None))
    return norm


def _change(new: torch.Tensor, old: torch.Tensor, room: list[torch.Tensor]) -> torch.Tensor:
    wide = _wide(new)
    if type(new) is not torch.Tensor:  # subclasses, such as quantized weights, need not write to `out`
        return wide - _wide(old)
    if not room or len(room[0]) < wide.numel() or room[0].dtype != wide.dtype:
        room[:] = [torch.empty(wide.numel(), dtype=wide.dtype, device="cpu")]  # slower to get than to write
    return torch.sub(wide, _wide(old), out=room[0][: wide.numel()].view(wide.shape))


def _norm(update: torch.Tensor) -> float:
    seen = look.read([update])
    found = seen.measured(EUCLIDEAN) if seen else None
    if found:
        return found[0]
    largest = float(update.abs().max())
    return largest * float(torch.linalg.vector_norm(update.double() / largest)) if largest else 0.0


def _shorten_without_waiting(pairs: Sequence[_Pair], rate: float | torch.Tensor, max_rms: float) -> torch.Tensor:
    """Bound the updates by operations alone, and return the largest RMS, as `shorten` does."""
    changes = torch._foreach_sub(*([_wide(one) for one in each] for each in zip(*pairs, strict=True)))
    updates = [SimpleNamespace(grad=change) for change in changes]
    roots = [math.sqrt(update.grad.numel()) for update in updates]
    limits: list[Any] = [max_rms * root * _LOWERED for root in roots]
    if isinstance(rate, torch.Tensor) and max_rms < math.inf:
        limits = list(torch._foreach_mul([rate.to(change.real.dtype) for change in changes], limits))
    elif max_rms < math.inf:
        limits = [rate * limit for limit in limits]
    norms: list[Any] = clip_grad_layer_norm_(updates, limits)
    triples = [(*pair, update.grad) for pair, update in zip(pairs, updates, strict=True)]
    for some in _together(each for triple in triples for each in zip(*map(_local_slices, triple), strict=True)):
        _rewrite(*zip(*some, strict=True))
    each = [norm.to(norms[0].device, torch.float32) for norm in torch._foreach_div(norms, roots)]
    largest = torch.stack(each).max()
    return torch.where(largest == 0, largest, largest / rate)


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _local_slices(values: torch.Tensor) -> Sequence[torch.Tensor]:
    return _slices(values.to_local() if isinstance(values, DTensor) else values, _AT_ONCE)


def _together(triples: Iterable[_Triple]) -> Iterator[list[_Triple]]:
    """Yield arrays of one dtype and device that have at most `_AT_ONCE` elements, or one larger array."""
    waiting: dict[object, list[_Triple]] = {}
    for triple in triples:
        some = waiting.setdefault((triple[0].dtype, triple[0].device), [])
        if some and sum(one[0].numel() for one in some) + triple[0].numel() > _AT_ONCE:
            yield list(some)
            some.clear()
        some.append(triple)
    yield from waiting.values()


def _rewrite(after: Sequence[torch.Tensor], before: Sequence[torch.Tensor], updates: Sequence[torch.Tensor]) -> None:
    """Write the sums of `before` and `updates` into `after`, where the updates were shortened."""
    new, old, update = (torch.cat([one.reshape(-1) for one in each]) for each in (after, before, updates))
    shortened = update.abs() < (_wide(new) - _wide(old)).abs()
    stored = torch.where(shortened, _sum_toward(old, update), new).split([one.numel() for one in after])
    torch._foreach_copy_(after, [part.view(one.shape) for part, one in zip(stored, after, strict=True)])


def _slices(local: torch.Tensor, at_once: int) -> Sequence[torch.Tensor]:
    """Return the elements, real and imaginary parts beside each other, in slices along the first axis."""
    local = torch.view_as_real(local) if local.is_complex() else local
    local = local.reshape(1) if local.dim() == 0 else local
    rows = max(1, at_once * local.shape[0] // max(1, local.numel()))
    return local.split(rows)


def _sum_toward(before: torch.Tensor, update: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum, rounded toward `before` in its dtype; if asked, write it `into` memory. Overwrites `update`."""
    start = _wide(before)
    stored = (start + update).to(before.dtype) if into is None else torch.add(start, update, out=into)
    beyond = torch.sub(_wide(stored), start).abs_().ge_(update.abs_())  # 0 or 1
    nearer = torch.nextafter(stored, before)
    return stored.addcmul_(nearer.sub_(stored), beyond.to(stored.dtype))  # exact, and faster than torch.where
