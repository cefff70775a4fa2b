"""PyTorch: CPU tensors as host memory; any other device, and tracing, through the portable operations."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from array_api_compat import torch as namespace

from gradclip.backends.formats import BFLOAT16, FLOAT32, FLOAT64, dtype_name
from gradclip.backends.host import HostArray
from gradclip.backends.numpy import Host, checked_dtype, sum_dtype
from gradclip.backends.portable import Portable
from gradclip.backends.torch_autograd import call_differentiably

_BLOCK = 1 << 22
_WITHOUT_FLOAT64 = ("mps", "xla")


class TorchHost(Host):
    """Tensors in host memory, viewed as NumPy arrays."""

    def prepare(self, leaf: Any) -> torch.Tensor:
        return prepared(leaf)

    def enter(self, leaf: torch.Tensor) -> HostArray:
        return viewed(leaf)

    def prepare_in_place(self, leaf: Any, name: str) -> torch.Tensor:
        return prepared_in_place(leaf, name)

    def writable(self, leaf: torch.Tensor) -> bool:
        return writable(leaf)

    def wrote(self, leaf: torch.Tensor) -> None:
        if not leaf.is_inference():
            torch.autograd.graph.increment_version(leaf)

    def leave(self, array: HostArray, leaf: Any) -> torch.Tensor:
        return restored(unviewed(array), leaf)

    def leave_count(self, flags: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(super().leave_count(flags))

    def booleans(self, mask: Any) -> np.ndarray:
        return torch.as_tensor(mask, dtype=torch.bool).numpy()

    def leave_sum(self, wide: np.ndarray, x: HostArray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(super().leave_sum(wide, x)))

    def leave_scalar(self, value: Any, dtype: str, leaves: Sequence[Any]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(super().leave_scalar(value, dtype, leaves)))

    def clamped(self, prepared: torch.Tensor, leaf: Any, bound: float) -> torch.Tensor:
        """Clamp with PyTorch's own operation, which has a derivative."""
        return Torch(prepared.device, visible=True).clamped(prepared, leaf, bound)

    def differentiable(self, function: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        return partial(call_differentiably, function, rule)


class Torch(Portable):
    """Tensors whose values are not looked at: on an accelerator, under `torch.compile` and `torch.func`."""

    def __init__(self, device: torch.device, *, visible: bool) -> None:
        super().__init__(namespace, FLOAT32 if device.type in _WITHOUT_FLOAT64 else FLOAT64)
        self.device = device
        self.visible = visible

    def prepare(self, leaf: Any) -> torch.Tensor:
        return prepared(leaf)

    def enter(self, leaf: torch.Tensor) -> torch.Tensor:
        return leaf

    def prepare_in_place(self, leaf: Any, name: str) -> torch.Tensor:
        return prepared_in_place(leaf, name)

    def leave(self, array: torch.Tensor, leaf: Any) -> torch.Tensor:
        return restored(array, leaf)

    def leave_count(self, flags: torch.Tensor) -> torch.Tensor:
        return flags.sum()

    def booleans(self, mask: Any) -> torch.Tensor:
        return torch.as_tensor(mask, dtype=torch.bool, device=self.device)

    def leave_sum(self, wide: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return wide.to(getattr(torch, sum_dtype(x, wide)))

    def leave_scalar(self, value: Any, dtype: str, leaves: Sequence[Any]) -> torch.Tensor:
        return value.to(getattr(torch, dtype))

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

    def bits(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.int64 if self.wide is FLOAT64 else torch.int32)

    def from_bits(self, bits: torch.Tensor) -> torch.Tensor:
        return bits.view(self.wide_dtype)

    def complex(self, real: torch.Tensor, imag: torch.Tensor) -> torch.Tensor:
        return torch.complex(real, imag)

    def shrink(self, x: torch.Tensor, coefficient: Any) -> torch.Tensor:
        return super().shrink(x, moved(coefficient, x.device))

    def power_sum(self, x: torch.Tensor, p: float, divisor: Any = None, *, batched: bool = False) -> torch.Tensor:
        if not batched:
            divisor = divisor.to(x.device) if divisor is not None else None
            return super().power_sum(x, p, divisor)
        sums = [
            super(Torch, self).power_sum(x[b], p, None if divisor is None else divisor[b], batched=True)
            for b in _blocks(x)
        ]
        return torch.cat(sums)

    def weighted_sum(self, x: torch.Tensor, coefficient: Any) -> torch.Tensor:
        blocks = _blocks(x)
        total = super().weighted_sum(x[blocks[0]], _rows(coefficient, blocks[0]))
        for b in blocks[1:]:
            total += super().weighted_sum(x[b], _rows(coefficient, b))
        return total

    def clamped(self, prepared: torch.Tensor, leaf: Any, bound: Any) -> torch.Tensor:
        return restored(self.clamp(prepared, bound), leaf)

    def update(self, leaf: Any, x: Any, new: Any, coefficient: Any) -> torch.Tensor:
        return self._put(leaf, x, self.shrink(new, coefficient))

    def update_clamped(self, leaf: Any, x: torch.Tensor, bound: float) -> torch.Tensor:
        return self._put(leaf, x, self.clamp(x, bound))

    def _put(self, leaf: torch.Tensor, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Write the result where the gradient lies, or return another that replaces it."""
        if not writable(leaf):
            return restored(result, leaf)
        x.copy_(result)
        return leaf

    def differentiable(self, function: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        return partial(call_differentiably, function, rule)


def prepared_in_place(leaf: Any, name: str) -> torch.Tensor:
    """Return the dense tensor that shares a gradient's memory."""
    dense = leaf if leaf.layout is torch.strided else stored_values(leaf)
    return checked_dtype(dense, name)


def writable(tensor: torch.Tensor) -> bool:
    """Say whether each element of a gradient has a place of its own that can be written."""
    if tensor.layout is torch.sparse_coo:
        return tensor.is_coalesced()
    if tensor.layout is not torch.strided:
        return True
    expanded = any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return not (expanded or tensor.is_conj() or tensor.is_neg())


def prepared(leaf: Any) -> torch.Tensor:
    """Return the dense tensor that holds a leaf's values, integers promoted to the default dtype."""
    tensor = torch.as_tensor(leaf)
    if tensor.layout is not torch.strided:
        tensor = stored_values(tensor)
    if not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool:
        tensor = tensor.to(torch.get_default_dtype())
    return checked_dtype(tensor)


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse tensor, those of one position summed."""
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()


def restored(values: torch.Tensor, leaf: Any) -> torch.Tensor:
    """Return `values` in the sparse layout of `leaf`, or as they are where that is dense."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is torch.strided:
        return values
    if leaf.layout is torch.sparse_coo:
        indices = leaf.coalesce().indices()
        return torch.sparse_coo_tensor(indices, values, leaf.shape, is_coalesced=True, check_invariants=False)
    rows = leaf.layout in (torch.sparse_csr, torch.sparse_bsr)
    compressed = leaf.crow_indices() if rows else leaf.ccol_indices()
    plain = leaf.col_indices() if rows else leaf.row_indices()
    return torch.sparse_compressed_tensor(
        compressed, plain, values, leaf.shape, layout=leaf.layout, check_invariants=False
    )


def viewed(tensor: torch.Tensor) -> HostArray:
    """Return a view of a CPU tensor's memory."""
    name = dtype_name(tensor)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if name == BFLOAT16.name:
        return HostArray(tensor.view(torch.int16).numpy().view(np.uint16), name)
    return HostArray(tensor.numpy(), name)


def unviewed(array: HostArray) -> torch.Tensor:
    """Return the tensor that shares memory with `array`."""
    if array.dtype == BFLOAT16.name:
        return torch.from_numpy(array.data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.data)


def moved(coefficient: Any, device: torch.device) -> Any:
    """Return the coefficient with its scalars on `device`."""
    return mapped(coefficient, lambda value: value.to(device))


def mapped(coefficient: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the coefficient with each of its tensors changed."""
    values = {field.name: getattr(coefficient, field.name) for field in fields(coefficient)}
    tensors = {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}
    return replace(coefficient, **{name: change(v) for name, v in tensors.items()})


def _rows(coefficient: Any, block: slice) -> Any:
    return mapped(coefficient, lambda value: value[block])


def _blocks(x: torch.Tensor) -> list[slice]:
    """Return slices of the first axis of which each holds at most some `_BLOCK` elements, one row at least."""
    rows = max(1, _BLOCK // max(1, x[:1].numel()))
    return [slice(start, start + rows) for start in range(0, max(1, x.shape[0]), rows)]


def in_host_memory(tensor: torch.Tensor) -> bool:
    """Say whether the values of a tensor lie in host memory and may be looked at."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and tensor.device.type == "cpu" and not _wrapped(tensor)


def _wrapped(tensor: torch.Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def backend(leaves: Sequence[Any], scalars: Sequence[Any]) -> TorchHost | Torch:
    """Return the backend for these tensors: the host's where all of them lie in its memory."""
    tensors = [t for t in (*leaves, *scalars) if isinstance(t, torch.Tensor)]
    visible = not torch.compiler.is_compiling() and not any(map(_wrapped, tensors))
    if visible and all(map(in_host_memory, tensors)):
        return HOST
    return Torch(tensors[0].device, visible=visible)


HOST = TorchHost()
