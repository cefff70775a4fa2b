"""The backend for PyTorch tensors on any device or under tracing, built on the portable operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from array_api_compat import torch as namespace

from gradclip._src.backends import any_distributed
from gradclip._src.backends.torch.autograd import asked, call_differentiably
from gradclip._src.backends.torch.device_examples import Examples
from gradclip._src.backends.torch.launched import Launched
from gradclip._src.backends.torch.multi_tensor import MultiTensor, ordinary, without_nonfinite_
from gradclip._src.backends.torch.tensors import (
    KNOWN,
    dense,
    floating,
    meeting_when_compiled,
    not_above,
    put_all,
    region,
    restored,
    sent,
    stored,
    writable,
    write_back,
)
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.coefficient import not_above_integer
from gradclip._src.core.formats import FLOAT16, FLOAT32, FLOAT64, Format, sum_dtype
from gradclip._src.core.layouts import Layout, Scope, Several
from gradclip._src.core.memory import Region
from gradclip._src.core.norms import Norm, Order, relative_error
from gradclip._src.core.protocols import Backend
from gradclip._src.core.rules import Coefficient, Into, OneFactor
from gradclip._src.flush_mode import caller_flushes

# Apple GPUs have no float64, and an XLA device may be a TPU.
_WITHOUT_FLOAT64 = ("mps", "xla")


class Torch(Examples):
    """Tensors whose values are not read: on an accelerator, or under `torch.compile` and `torch.func`."""

    def __init__(self, device: torch.device, *, visible: bool) -> None:
        super().__init__(namespace, FLOAT64 if _has_float64(device) else FLOAT32)
        self.device = device
        self.visible = visible
        # Compiled code runs under whatever flush mode its caller sets later. PyTorch's threads keep the mode from when
        # they were started.
        self._may_flush = device.type == "cpu" and (torch.compiler.is_compiling() or caller_flushes())
        if self._may_flush:
            self.divisors_above = self.wide.tiny

    def flushed_below(self, element: Format) -> float:
        return element.tiny if self._may_flush and element is not FLOAT16 else 0.0

    def prepare(self, leaf: object) -> torch.Tensor:
        # A distributed tensor of partial sums has no norm until the sum is computed.
        return _summed(floating(dense(leaf)))

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
        # Derivatives come from a rule. A graph of these steps would only hold memory.
        return torch.no_grad()

    def scalar(self, value: float | torch.Tensor, near: Sequence[torch.Tensor]) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            if not value.is_floating_point():
                return sent(not_above_integer(self, value), self.device)
            value = not_above(value) if self.wide is FLOAT32 and value.dtype is torch.float64 else value
            return sent(value, self.device).to(self.wide_dtype)
        if isinstance(value, np.ndarray):
            return sent(torch.tensor(value, dtype=self.wide_dtype, device="cpu"), self.device)
        if self.varies(value):
            # A sum with a tensor is what compilers turn into operations on a tensor. They compile others again.
            return torch.zeros((), dtype=self.wide_dtype, device=self.device) + value
        if self.wide is FLOAT32 and value > 0:
            value = FLOAT32.toward_zero(value)  # a threshold must never be rounded up
        # Filled on the device: copying a number from the host would wait.
        return torch.full((), value, dtype=self.wide_dtype, device=self.device)

    def varies(self, value: object) -> bool:
        if not (torch.compiler.is_compiling() and isinstance(value, float)):
            return False
        # Imported late: it takes a second, and compilers have imported it.
        from torch.fx.experimental.symbolic_shapes import has_static_value

        return not has_static_value(value)

    def clamped(self, x: torch.Tensor, bound: float | torch.Tensor) -> torch.Tensor:
        with self.precision():
            limit: torch.Tensor = self.narrow(self.limit(bound, x), x)
        # Leaves may be on several devices.
        limit = limit.to(x.device)
        return torch.clamp(x, -limit, limit)

    def zeros(self, shape: tuple[int, ...], near: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.wide_dtype, device=self.device)

    def gather(self, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # Waiting for each device separately would make every one of them idle.
        return [sent(term, self.device) for term in terms]

    def bits(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.int64 if x.dtype is torch.float64 else torch.int32)

    def from_bits(self, bits: torch.Tensor) -> torch.Tensor:
        return bits.view(torch.float64 if bits.dtype is torch.int64 else torch.float32)

    def complex(self, real: torch.Tensor, imag: torch.Tensor) -> torch.Tensor:
        return torch.complex(real, imag)

    def multi_tensor(self, arrays: Arrays) -> Mapping[Format, int] | None:
        return getattr(self.grouped(arrays), "elements", None)

    def grouped(self, arrays: Arrays) -> MultiTensor | None:
        """Return what multiplies the tensors, in few operations; None if they are better scaled one by one."""
        if torch.compiler.is_compiling():  # compiled code cannot cache on an object
            return MultiTensor.of(arrays.items)
        # Transforms of `torch.func` have no rules for these operations, and flushing subnormals would change values
        # that are kept.
        if self._may_flush or not self.visible:
            return None
        if arrays.grouped is None:
            arrays.grouped = Launched.of(arrays.items) or False
        return arrays.grouped or None

    def sum_error(self, count: int, arrays: Arrays, p: float, scope: Scope) -> float:
        together = self._together(arrays, p) if scope.whole else None
        if together is None:
            return super().sum_error(count, arrays, p, scope)
        # Whatever the order, each term goes through the additions of one tensor, then those of the tensors' norms.
        return (together.largest + len(arrays) + 8) * self.wide.roundoff

    def roots(self, arrays: Arrays, order: Order, scope: Scope) -> tuple[torch.Tensor, torch.Tensor | None]:
        together = self._together(arrays, order.p) if scope.whole and FLOAT64 not in arrays.formats else None
        if together is None:
            return super().roots(arrays, order, scope)
        p, norms = arrays.each or (None, None)
        norms = norms if p == order.p else together.norms(arrays, order.p, self.device)
        return torch.linalg.vector_norm(norms, order.p), None

    def power_sum(self, arrays: Arrays, p: float, scope: Scope, divisor: torch.Tensor | None = None) -> torch.Tensor:
        together = self._together(arrays, p) if scope.whole else None
        if together is None:
            return super().power_sum(arrays, p, scope, divisor)
        norm = torch.linalg.vector_norm(together.norms(arrays, p, self.device, divisor), p)
        return norm * norm if p == 2 else norm

    def largest(self, arrays: Arrays, scope: Scope) -> torch.Tensor:
        together = self._together(arrays, math.inf) if scope.whole else None
        if together is None:
            return super().largest(arrays, scope)
        return together.norms(arrays, math.inf, self.device).max()

    def scaled_power_sum(self, arrays: Arrays, p: float, scope: Scope) -> tuple[torch.Tensor, torch.Tensor]:
        together = self._together(arrays, p) if scope.whole else None
        if together is None:
            return super().scaled_power_sum(arrays, p, scope)
        # For complex numbers, the largest of their parts.
        divisor = self.divisor(together.norms(arrays, math.inf, self.device).max())
        return self.power_sum(arrays, p, scope, divisor), divisor

    def unstacked(self, vectors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        return [list(vector.unbind()) for vector in vectors]

    def without_nonfinite(self, arrays: Arrays) -> Arrays:
        if arrays.any_complex or self.grouped(arrays) is None:
            return super().without_nonfinite(arrays)
        return Arrays([torch.nan_to_num(x, 0.0, 0.0, 0.0) for x in arrays], arrays.dtypes)

    def norms_of_several(self, arrays: Arrays, order: Order, layout: Several) -> Norm:
        together = self._together(arrays, order.p) if {len(part.indices) for part in layout.parts} == {1} else None
        divided = FLOAT64 in arrays.formats and order.p != math.inf
        # For float32 tensors, the division would run in float32.
        if together is None or (divided and len(arrays.formats) > 1):
            return super().norms_of_several(arrays, order, layout)
        divisor = self.divisor(together.norms(arrays, math.inf, self.device)) if divided else None
        value = together.norms(arrays, order.p, self.device, divisor)
        arrays.each = None if divided or torch.compiler.is_compiling() else (order.p, value)
        error = relative_error(order, (together.largest + 9) * self.wide.roundoff, self.wide, exact=order.extreme)
        return Norm(value, divisor, error, self.floor(arrays, max(x.numel() for x in arrays), order))

    def _together(self, arrays: Arrays, p: float) -> MultiTensor | None:
        """Return what computes the norms of all tensors at once in float64, or None."""
        orders = (2,) if arrays.any_complex else (1, 2, math.inf)
        return self.grouped(arrays) if p in orders and self.wide is FLOAT64 else None

    def vectorisable_with(self, arrays: Sequence[Any]) -> Hashable | None:
        # The rule that differentiates many layers at once does not exist for PyTorch.
        if asked(arrays) or not ordinary(arrays) or self.grouped(Arrays(arrays)) is None:
            return None
        return tuple({x.device: None for x in arrays})

    def shrunk(self, x: torch.Tensor, coefficient: Coefficient, scope: Scope) -> torch.Tensor:
        # Leaves may be on several devices. The coefficient is on the first leaf's device.
        return super().shrunk(x, coefficient.mapped(lambda value: value.to(x.device)), scope)

    def region(self, leaf: torch.Tensor) -> Region | None:
        return region(leaf) if type(leaf) in KNOWN else None

    def meeting(self, leaves: Sequence[Any], owners: Sequence[Any]) -> list[list[int]]:
        if torch.compiler.is_compiling():
            return list(map(list, meeting_when_compiled(*owners)))
        return super().meeting(leaves, owners)

    def write_back(self, leaf: torch.Tensor, copy: torch.Tensor) -> None:
        write_back(leaf, copy)

    def collide(self, leaves: Sequence[Any], arrays: Arrays) -> bool:
        if torch.compiler.is_compiling():
            return len(leaves) > 1
        if not self.visible or not set(map(type, leaves)) <= KNOWN:
            return False
        # Compare storages, which needs no wait for the device. Views of one storage need not overlap, but True is the
        # answer when in doubt.
        dense = [leaf for leaf in leaves if leaf.layout is torch.strided]
        return len({leaf.untyped_storage()._cdata for leaf in dense}) < len(leaves)

    def writable(self, leaves: Sequence[torch.Tensor]) -> bool:
        return all(map(writable, leaves))

    def clear(self, arrays: Arrays) -> None:
        arrays.each = None
        without_nonfinite_(arrays.items)

    def scale(self, arrays: Arrays, coefficient: Any, layout: Layout, into: Into | None = None) -> Sequence[Any]:
        together = self.grouped(arrays) if isinstance(coefficient, OneFactor) else None
        if together is None:
            # Written even if nothing is clipped: finding out would mean waiting for the device.
            return super().scale(arrays, coefficient, layout, into)
        if into is None or not self.writable(into.leaves):
            results = together.multiplied(arrays, coefficient)
            return results if into is None else self.write(results, into)
        into.arrays.each = None
        together.multiply(into.arrays, arrays, coefficient)
        return into.leaves

    def clamp(self, arrays: Arrays, bound: float | torch.Tensor, into: Into | None = None) -> Sequence[torch.Tensor]:
        one_for_all = isinstance(bound, float) and not self.varies(bound)
        together = self.grouped(arrays) if one_for_all and (into is None or self.writable(into.leaves)) else None
        if together is None:
            return super().clamp(arrays, bound, into)
        if into is None:
            return together.clamped(arrays, bound)
        together.clamp(arrays, bound)
        return into.leaves

    def write(self, results: Sequence[torch.Tensor], into: Into) -> Sequence[torch.Tensor]:
        return put_all(into.leaves, into.arrays, results)

    def differentiable(self, function: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        return partial(call_differentiably, function, rule)


_checked: type[Backend] = Torch


def _has_float64(device: torch.device) -> bool:
    if device.type == "xpu":  # only some have it
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type not in _WITHOUT_FLOAT64


def _summed(value: torch.Tensor) -> torch.Tensor:
    """Return a distributed tensor of partial sums with its sum computed, and any other tensor unchanged."""
    if not any_distributed([value]):
        return value
    # Imported late: most programs have no distributed tensors, and the import takes long.
    from gradclip._src.backends.torch.distributed import summed

    return summed(value)
