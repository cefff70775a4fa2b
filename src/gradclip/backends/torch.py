"""PyTorch: CPU tensors as host memory; any other device, and tracing, through the portable operations."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from array_api_compat import torch as namespace

from gradclip.arithmetic import caller_flushes
from gradclip.backends import any_distributed
from gradclip.backends.arrays import Arrays, check_dtypes
from gradclip.backends.formats import FLOAT16, FLOAT32, FLOAT64, Format
from gradclip.backends.host import HostArray, HostArrays
from gradclip.backends.memory import Region, any_overlap
from gradclip.backends.numpy import Host, sum_dtype, viewed_arrays
from gradclip.backends.portable import Portable, halving_sum
from gradclip.backends.protocols import Scope
from gradclip.backends.torch_autograd import call_differentiably
from gradclip.backends.torch_tensors import (
    dense,
    described,
    promoted,
    region,
    restored,
    stored,
    stretch,
    tensor_of,
    unviewed,
    viewed,
    with_memory,
    writable,
)

_BLOCK = 1 << 22
_WITHOUT_FLOAT64 = ("mps", "xla")
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_FLOATING = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_is_cpu = attrgetter("is_cpu")


class TorchHost(Host):
    """Tensors in host memory, viewed as NumPy arrays."""

    known_writable = True

    def threads(self) -> int:
        return torch.get_num_threads()

    def prepare(self, leaf: Any) -> torch.Tensor:
        if type(leaf) is torch.Tensor and leaf.dtype in _FLOATING and leaf.layout is torch.strided:
            return with_memory(stored(leaf))
        return promoted(with_memory(dense(leaf)))

    def prepare_in_place(self, leaf: Any) -> torch.Tensor:
        return stored(leaf)

    def plain(self, leaves: Sequence[Any]) -> bool:
        forward = torch.autograd.forward_ad._current_level >= 0
        asked = torch.is_grad_enabled() and any(getattr(leaf, "requires_grad", False) for leaf in leaves)
        return super().plain(leaves) and not (forward or asked)

    def enter(self, prepared: Sequence[torch.Tensor]) -> HostArrays:
        if any(tensor.is_conj() or tensor.is_neg() for tensor in prepared):
            return viewed_arrays(list(map(viewed, prepared)))
        return HostArrays(prepared, viewed, described(prepared))

    def enter_in_place(self, leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> HostArrays:
        known = described(leaves)
        sources = list(leaves)
        for index in known.left_out:
            sources[index] = with_memory(stored(leaves[index]), partial(_name, names, index))
        check_dtypes([sources[index] for index in known.left_out], lambda: [names()[i] for i in known.left_out])
        return HostArrays(sources, viewed, known)

    def region(self, leaf: Any) -> Region | None:
        return region(leaf)

    def collide(self, leaves: Sequence[Any], arrays: Arrays) -> bool:
        # By storages: to ask a tensor for its shape and strides takes longer than to clip it.
        if not isinstance(arrays, HostArrays) or not arrays.kernels:
            return any_overlap(map(stretch, leaves))
        return bool(arrays.kernels.overlap([stretch(leaves[index]) for index in arrays.left_out]))

    def writable(self, leaf: torch.Tensor) -> bool:
        return writable(leaf)

    def wrote(self, leaves: Sequence[torch.Tensor]) -> None:
        torch.autograd.graph.increment_version(leaves)

    def copies(self, arrays: Arrays) -> list[Any]:
        return [tensor.clone() for tensor in arrays.sources] if self._plainly(arrays) else super().copies(arrays)

    def entered_copies(self, copies: Sequence[Any]) -> HostArrays:
        return self.enter(copies) if isinstance(copies[0], torch.Tensor) else super().entered_copies(copies)

    def _plainly(self, arrays: Arrays) -> bool:
        """Say whether these are tensors that need no view as NumPy arrays, which takes as long as all the rest."""
        return self._all_known(arrays) and not isinstance(arrays.sources[0], HostArray)

    def places_for(self, arrays: Arrays) -> tuple[list[Any], Any]:
        if self._plainly(arrays):
            results = list(map(torch.empty_like, arrays.sources))
            targets = described(results)
            same_order = all(x.stride() == y.stride() for x, y in zip(arrays.sources, results, strict=True))
            if same_order and not targets.left_out:
                return results, targets.kernels
        return super().places_for(arrays)

    def leave(self, array: HostArray | torch.Tensor, leaf: Any) -> torch.Tensor:
        return restored(array if isinstance(array, torch.Tensor) else unviewed(array), leaf)

    def scalar(self, value: Any, near: Any) -> Any:
        return super().scalar(value.detach() if isinstance(value, torch.Tensor) else value, near)

    def leave_count(self, flags: np.ndarray, leaves: Sequence[Any]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(super().leave_count(flags, leaves)))

    def booleans(self, mask: Any) -> np.ndarray:
        return tensor_of(mask).to(torch.bool).numpy()

    def leave_sum(self, wide: np.ndarray, x: HostArray, dtype: str | None) -> torch.Tensor:
        return torch.from_numpy(np.asarray(super().leave_sum(wide, x, dtype)))

    def leave_scalar(self, value: Any, dtype: str, leaves: Sequence[Any]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(super().leave_scalar(value, dtype, leaves)))

    def leave_scalars(self, values: Any, dtype: str, leaves: Sequence[Any]) -> list[torch.Tensor]:
        return [scalar.clone() for scalar in super().leave_scalars(values, dtype, leaves)]

    def differentiable(self, function: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        return partial(call_differentiably, function, rule)


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
        """Return the format's smallest normal number where its subnormals may be read as zeros, 0.0 where never."""
        return element.tiny if self._may_flush and element is not FLOAT16 else 0.0

    def prepare(self, leaf: Any) -> torch.Tensor:
        return _summed(promoted(dense(leaf)))

    def prepare_in_place(self, leaf: Any) -> torch.Tensor:
        return stored(leaf)

    def leave(self, array: torch.Tensor, leaf: Any) -> torch.Tensor:
        return restored(array, leaf)

    def leave_count(self, flags: torch.Tensor, leaves: Sequence[Any]) -> torch.Tensor:
        return _summed(flags.sum())

    def booleans(self, mask: Any) -> torch.Tensor:
        return torch.as_tensor(mask, dtype=torch.bool, device=self.device)

    def leave_sum(self, wide: torch.Tensor, x: torch.Tensor, dtype: str | None) -> torch.Tensor:
        return wide.to(getattr(torch, sum_dtype(x, wide, dtype)))

    def leave_scalar(self, value: Any, dtype: str, leaves: Sequence[Any]) -> torch.Tensor:
        return _summed(value.to(getattr(torch, dtype)))

    def precision(self) -> AbstractContextManager[Any]:
        return torch.no_grad()

    def scalar(self, value: Any, near: Sequence[torch.Tensor]) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.to(self.device, self.wide_dtype)
        # Filled on the device: a tensor made from a number on the host would be copied there, which waits.
        return torch.full((), value, dtype=self.wide_dtype, device=self.device)

    def clamp(self, x: torch.Tensor, bound: Any) -> torch.Tensor:
        with self.precision():
            limit = self.narrow(self.limit(bound, x), x).to(x.device)
        return torch.clamp(x, -limit, limit)

    def zeros(self, shape: tuple[int, ...], near: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.wide_dtype, device=self.device)

    def gather(self, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [term.to(self.device, non_blocking=True) for term in terms]

    def single(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(torch.float32)

    def bits(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.int64 if x.dtype is torch.float64 else torch.int32)

    def from_bits(self, bits: torch.Tensor) -> torch.Tensor:
        return bits.view(torch.float64 if bits.dtype is torch.int64 else torch.float32)

    def complex(self, real: torch.Tensor, imag: torch.Tensor) -> torch.Tensor:
        return torch.complex(real, imag)

    def shrunk(self, x: torch.Tensor, coefficient: Any, scope: Scope) -> torch.Tensor:
        return super().shrunk(x, moved(coefficient, x.device), scope)

    def power_sum_of(self, x: torch.Tensor, p: float, scope: Scope, divisor: Any) -> torch.Tensor:
        own = scope.own_axes(x.ndim)
        if not own:
            divisor = divisor.to(x.device) if divisor is not None else None
            return super().power_sum_of(x, p, scope, divisor)
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

    def weighted_sum(self, x: torch.Tensor, coefficient: Any) -> torch.Tensor:
        blocks = _blocks(x)
        total = super().weighted_sum(x[blocks[0]], _rows(coefficient, blocks[0]))
        for b in blocks[1:]:
            total += super().weighted_sum(x[b], _rows(coefficient, b))
        return total

    def rounded_sum(self, x: torch.Tensor, coefficient: Any) -> torch.Tensor:
        return sum(super(Torch, self).rounded_sum(x[b], _rows(coefficient, b)) for b in _blocks(x))

    def clamped(self, prepared: torch.Tensor, leaf: Any, bound: Any) -> torch.Tensor:
        return restored(self.clamp(prepared, bound), leaf)

    def region(self, leaf: Any) -> Region | None:
        return region(leaf) if type(leaf) in _PLAIN else None

    def collide(self, leaves: Sequence[Any], arrays: Arrays) -> bool:
        if not self.visible or not set(map(type, leaves)) <= _PLAIN:
            return False
        dense = [leaf for leaf in leaves if leaf.layout is torch.strided]
        return len({leaf.untyped_storage()._cdata for leaf in dense}) < len(leaves)

    def writable(self, leaf: torch.Tensor) -> bool:
        return writable(leaf)

    def update(
        self, leaves: Sequence[Any], arrays: Arrays, new: Arrays, coefficient: Any, scope: Scope
    ) -> list[torch.Tensor]:
        results = self.shrink(new, coefficient, scope)
        return [self._put(leaf, x, y) for leaf, x, y in zip(leaves, arrays, results, strict=True)]

    def update_clamped(self, leaves: Sequence[Any], arrays: Arrays, bound: Any) -> list[torch.Tensor]:
        return [self._put(leaf, x, self.clamp(x, bound)) for leaf, x in zip(leaves, arrays, strict=True)]

    def _put(self, leaf: torch.Tensor, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Write the result where the gradient lies, or return another that replaces it."""
        if not writable(leaf):
            return restored(result, leaf)
        x.copy_(result)
        return leaf

    def differentiable(self, function: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        return partial(call_differentiably, function, rule)


def _name(names: Callable[[], Sequence[str]], index: int) -> str:
    return names()[index]


def _summed(value: torch.Tensor) -> torch.Tensor:
    """Return a distributed tensor of which the processes hold terms so that they hold the sum, another as it is."""
    if not any_distributed([value]):
        return value
    from gradclip.backends.torch_distributed import summed

    return summed(value)


def moved(coefficient: Any, device: torch.device) -> Any:
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


def _rows(coefficient: Any, block: slice) -> Any:
    return mapped(coefficient, lambda value: value[block])


def _blocks(x: torch.Tensor, axis: int = 0) -> list[slice]:
    """Return slices of an axis of which each holds at most some `_BLOCK` elements, one row at least."""
    rows = max(1, _BLOCK // max(1, math.prod(x.shape[:axis] + x.shape[axis + 1 :])))
    return [slice(start, start + rows) for start in range(0, max(1, x.shape[axis]), rows)]


def in_host_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether the values of all tensors lie in host memory, as plain tensors."""
    return set(map(type, tensors)) <= _PLAIN and all(map(_is_cpu, tensors))


def visible(tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether values can be looked at: nothing that records operations or transforms them stands between."""
    if torch.compiler.is_compiling() or _records_operations():
        return False
    functorch = torch._C._functorch
    return functorch.peek_interpreter_stack() is None or not any(map(functorch.is_functorch_wrapped_tensor, tensors))


def _records_operations() -> bool:
    """Say whether `make_fx` is at work, whose tensors look like any other."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def backend(leaves: Sequence[Any], scalars: Sequence[Any]) -> TorchHost | Torch:
    """Return the backend for these tensors: the host's where all of them lie in its memory.

    Raises RuntimeError under `torch.jit.trace`, which cannot record what is done to the bits of numbers.
    """
    if torch.jit.is_tracing():
        raise RuntimeError(
            "gradients cannot be clipped under torch.jit.trace: what it records would not depend on their values. "
            "Use torch.compile or torch.export, or leave clipping out of what is traced."
        )
    given = [scalar for scalar in scalars if isinstance(scalar, torch.Tensor)]
    here = not (given or torch.compiler.is_compiling()) and in_host_memory(leaves)
    tensors = leaves if here else [leaf for leaf in (*leaves, *given) if isinstance(leaf, torch.Tensor)]
    seen = visible(tensors)
    if seen and (here or in_host_memory(tensors)):
        return HOST
    return Torch(tensors[0].device, visible=seen)


HOST = TorchHost()
