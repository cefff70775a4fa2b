"""PyTorch tensors anywhere, through the portable operations: on an accelerator, and where operations are traced."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from array_api_compat import torch as namespace

from gradclip.arithmetic import caller_flushes
from gradclip.backends import any_distributed
from gradclip.backends.arrays import Arrays
from gradclip.backends.formats import FLOAT16, FLOAT32, FLOAT64, Format, sum_dtype
from gradclip.backends.memory import Region
from gradclip.backends.portable import Portable
from gradclip.backends.protocols import Backend, Scope
from gradclip.backends.sums import halving_sum
from gradclip.backends.torch.autograd import call_differentiably
from gradclip.backends.torch.tensors import (
    PLAIN,
    dense,
    promoted,
    region,
    restored,
    stored,
    writable,
)

if TYPE_CHECKING:
    from gradclip.core.coefficient import Coefficient

_BLOCK = 1 << 22  # elements: their float64 copy takes 32 MiB, where one of the batch might not fit
# Apple's GPUs have no float64, and an XLA device may be a TPU.
_WITHOUT_FLOAT64 = ("mps", "xla")


class Torch(Portable):
    """Tensors whose values are not looked at: on an accelerator, under `torch.compile` and `torch.func`."""

    def __init__(self, device: torch.device, *, visible: bool) -> None:
        super().__init__(namespace, FLOAT32 if device.type in _WITHOUT_FLOAT64 else FLOAT64)
        self.device = device
        self.visible = visible
        # Compiled code meets whatever its caller has set later, and PyTorch's threads what was set when they started.
        self._may_flush = device.type == "cpu" and (torch.compiler.is_compiling() or caller_flushes())
        if self._may_flush:
            self.divisors_above = self.wide.tiny

    def flushed_below(self, element: Format) -> float:
        return element.tiny if self._may_flush and element is not FLOAT16 else 0.0

    def prepare(self, leaf: object) -> torch.Tensor:
        # Terms of a sum have no norm before they are added up.
        return _summed(promoted(dense(leaf)))

    def prepare_in_place(self, leaf: torch.Tensor) -> torch.Tensor:
        return stored(leaf)

    def leave(self, array: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        return restored(array, leaf)

    def leave_count(self, flags: torch.Tensor, leaves: Sequence[Any]) -> torch.Tensor:
        return _summed(flags.sum())

    def booleans(self, mask: object) -> torch.Tensor:
        return torch.as_tensor(mask, dtype=torch.bool, device=self.device)

    def leave_sum(self, wide: torch.Tensor, x: torch.Tensor, dtype: str | None) -> torch.Tensor:
        return wide.to(getattr(torch, sum_dtype(x, wide, dtype)))

    def leave_scalar(self, value: torch.Tensor, dtype: str, leaves: Sequence[Any]) -> torch.Tensor:
        return _summed(value.to(getattr(torch, dtype)))

    def precision(self) -> AbstractContextManager[Any]:
        # Derivatives come from a rule: a graph of these steps would only keep memory.
        return torch.no_grad()

    def scalar(self, value: float | torch.Tensor, near: Sequence[torch.Tensor]) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.to(self.device, self.wide_dtype)
        # Filled on the device: a tensor made from a number on the host would be copied there, which waits.
        return torch.full((), value, dtype=self.wide_dtype, device=self.device)

    def clamp(self, x: torch.Tensor, bound: float | torch.Tensor) -> torch.Tensor:
        with self.precision():
            limit: torch.Tensor = self.narrow(self.limit(bound, x), x)
        # Leaves may lie on several devices.
        limit = limit.to(x.device)
        return torch.clamp(x, -limit, limit)

    def zeros(self, shape: tuple[int, ...], near: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.wide_dtype, device=self.device)

    def gather(self, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # Waiting for one device after the other would let all of them stand still in turn.
        return [term.to(self.device, non_blocking=True) for term in terms]

    def single(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(torch.float32)

    def bits(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.int64 if x.dtype is torch.float64 else torch.int32)

    def from_bits(self, bits: torch.Tensor) -> torch.Tensor:
        return bits.view(torch.float64 if bits.dtype is torch.int64 else torch.float32)

    def complex(self, real: torch.Tensor, imag: torch.Tensor) -> torch.Tensor:
        return torch.complex(real, imag)

    def shrunk(self, x: torch.Tensor, coefficient: Coefficient, scope: Scope) -> torch.Tensor:
        # Leaves may lie on several devices; the coefficient lies on the first one's.
        return super().shrunk(x, moved(coefficient, x.device), scope)

    def power_sum_of(self, x: torch.Tensor, p: float, scope: Scope, divisor: torch.Tensor | None) -> torch.Tensor:
        own = scope.own_axes(x.ndim)
        if not own:
            divisor = divisor.to(x.device) if divisor is not None else None
            return super().power_sum_of(x, p, scope, divisor)
        # A block of rows after the other: a float64 copy of a whole batch would be as large as several batches.
        sums = []
        for b in _blocks(x, own[0]):
            some = x[(*[slice(None)] * own[0], b)]
            sums.append(super().power_sum_of(some, p, scope, None if divisor is None else divisor[b]))
        return torch.cat(sums)

    def sum_shared(self, wide: torch.Tensor, scope: Scope) -> torch.Tensor:
        """Return the sum over the axes that share a norm, in an order that does not depend on how many there are."""
        if not scope.own_axes(wide.ndim):
            return super().sum_shared(wide, scope)
        return halving_sum(self.xp, wide, scope.shared_axes(wide.ndim))

    def weighted_sum(self, x: torch.Tensor, coefficient: Coefficient) -> torch.Tensor:
        blocks = _blocks(x)
        total = super().weighted_sum(x[blocks[0]], _rows(coefficient, blocks[0]))
        for b in blocks[1:]:
            total += super().weighted_sum(x[b], _rows(coefficient, b))
        return total

    def rounded_sum(self, x: torch.Tensor, coefficient: Coefficient) -> torch.Tensor:
        return sum(super(Torch, self).rounded_sum(x[b], _rows(coefficient, b)) for b in _blocks(x))

    def region(self, leaf: torch.Tensor) -> Region | None:
        return region(leaf) if type(leaf) in PLAIN else None

    def collide(self, leaves: Sequence[Any], arrays: Arrays) -> bool:
        if not self.visible or not set(map(type, leaves)) <= PLAIN:
            return False
        # By storages, which cost no look at the device. Views of one storage may be apart: `True` is where in doubt.
        dense = [leaf for leaf in leaves if leaf.layout is torch.strided]
        return len({leaf.untyped_storage()._cdata for leaf in dense}) < len(leaves)

    def writable(self, leaf: torch.Tensor) -> bool:
        return writable(leaf)

    def update(
        self, leaves: Sequence[Any], arrays: Arrays, new: Arrays, coefficient: Coefficient, scope: Scope
    ) -> list[torch.Tensor]:
        # Also where nothing is clipped: to find that out would mean to wait for the device.
        results = self.shrink(new, coefficient, scope)
        return [self._put(leaf, x, y) for leaf, x, y in zip(leaves, arrays, results, strict=True)]

    def update_clamped(self, leaves: Sequence[Any], arrays: Arrays, bound: float | torch.Tensor) -> list[torch.Tensor]:
        return [self._put(leaf, x, self.clamp(x, bound)) for leaf, x in zip(leaves, arrays, strict=True)]

    def _put(self, leaf: torch.Tensor, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Write the result where the gradient lies, or return another that replaces it."""
        if not writable(leaf):
            return restored(result, leaf)
        x.copy_(result)
        return leaf

    def differentiable(self, function: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        return partial(call_differentiably, function, rule)


_checked: type[Backend] = Torch


def _summed(value: torch.Tensor) -> torch.Tensor:
    """Return a distributed tensor that holds the sum where processes hold terms of one; any other tensor as it is."""
    if not any_distributed([value]):
        return value
    # Imported late: most programs have no distributed tensors, and the import takes long.
    from gradclip.backends.torch.distributed import summed

    return summed(value)


def moved(coefficient: Coefficient, device: torch.device) -> Any:
    """Return the coefficient with its scalars on `device`."""
    return mapped(coefficient, lambda value: value.to(device))


def mapped(coefficient: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the coefficient, or factors, with each tensor in it changed."""
    values = {field.name: getattr(coefficient, field.name) for field in fields(coefficient)}
    changed = {name: _changed(value, change) for name, value in values.items()}
    return replace(coefficient, **changed)


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    return mapped(value, change) if is_dataclass(value) else value


def _rows(coefficient: Coefficient, block: slice) -> Any:
    return mapped(coefficient, lambda value: value[block])


def _blocks(x: torch.Tensor, axis: int = 0) -> list[slice]:
    """Return slices of an axis of which each holds at most some `_BLOCK` elements, one row at least."""
    rows = max(1, _BLOCK // max(1, math.prod(x.shape[:axis] + x.shape[axis + 1 :])))
    return [slice(start, start + rows) for start in range(0, max(1, x.shape[axis]), rows)]
