"""The backend for PyTorch tensors in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradclip._src.backends.host.arrays import HostArray, HostArrays, split, viewed_arrays
from gradclip._src.backends.host.backend import Host
from gradclip._src.backends.torch.autograd import call_differentiably
from gradclip._src.backends.torch.tensors import (
    PLAIN,
    dense,
    described,
    floating,
    region,
    restored,
    stored,
    stretch,
    tensor_of,
    unviewed,
    viewed,
    with_memory,
    writable,
    write_back,
)
from gradclip._src.core.arrays import Arrays, check_dtypes
from gradclip._src.core.memory import Region, any_overlap
from gradclip._src.core.protocols import HostBackend
from gradclip._src.native import Described
from gradclip._src.words import typed

if TYPE_CHECKING:
    from gradclip._src.native._kernels import Arrays as KernelArrays

_CPU = torch.device("cpu")
_SCALARS = {"float32": torch.float32, "float64": torch.float64}
_REQUIRES_GRAD = attrgetter("requires_grad")
_STRIDED = {torch.strided}
_IS_NEG, _IS_CONJ = torch.Tensor.is_neg, torch.Tensor.is_conj
_COMPLEX = {"complex64", "complex128"}
_FLOATING = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class TorchHost(Host):
    """Tensors in host memory, viewed as NumPy arrays."""

    known_writable = True

    def threads(self) -> int:
        # As many as PyTorch's own operations use, because the user may have limited them.
        return torch.get_num_threads()

    def prepare(self, leaf: Any) -> torch.Tensor:
        if type(leaf) is torch.Tensor and leaf.dtype in _FLOATING and leaf.layout is torch.strided:
            return with_memory(stored(leaf))
        return floating(with_memory(dense(leaf)))

    def prepare_in_place(self, leaf: torch.Tensor) -> torch.Tensor:
        return stored(leaf)

    def plain(self, leaves: Sequence[Any]) -> bool:
        # Check the level, which costs nothing. Checking for tangents takes a call for each tensor.
        forward = torch.autograd.forward_ad._current_level >= 0
        asked = torch.is_grad_enabled() and _any_requires_grad(leaves)
        return super().plain(leaves) and not (forward or asked)

    def known(self, leaves: Sequence[Any]) -> KernelArrays | None:
        kernels, left_out = described(leaves)
        # The memory of a negated or conjugated view holds the original's numbers, not its own.
        if left_out or any(map(_IS_NEG, leaves)):
            return None
        has_complex = not _COMPLEX.isdisjoint(kernels.dtypes)
        return None if has_complex and any(map(_IS_CONJ, leaves)) else kernels

    def chosen(self, arrays: Arrays, indices: Sequence[int]) -> HostArrays:
        sources = [arrays.sources[index] for index in indices]
        if not all(isinstance(source, torch.Tensor) for source in sources):
            return super().chosen(arrays, indices)
        return HostArrays(sources, viewed, described(sources))

    def new_like(self, leaves: Sequence[torch.Tensor], *, copied: bool) -> list[Any]:
        return [leaf.clone() for leaf in leaves] if copied else list(map(torch.empty_like, leaves))

    def number(self, value: float, dtype: str) -> torch.Tensor:
        return torch.scalar_tensor(value, dtype=_SCALARS[dtype], device=_CPU)

    def array(self, values: np.ndarray | np.generic, dtype: str) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values.astype(dtype)))

    def enter(self, prepared: Sequence[torch.Tensor]) -> HostArrays:
        # Conjugated and negated tensors share memory with their originals, so the stored numbers are not their own.
        if any(tensor.is_conj() or tensor.is_neg() for tensor in prepared):
            return viewed_arrays(list(map(viewed, prepared)))
        return HostArrays(prepared, viewed, described(prepared))

    def arrays_of(self, leaves: Sequence[Any], kernels: KernelArrays) -> HostArrays:
        return HostArrays(leaves, viewed, Described(kernels, ()))

    def take(self, leaves: Sequence[Any]) -> HostArrays:
        # As for gradients in place, but conjugated and negated tensors are not changed, so copies will do.
        if not set(map(type, leaves)) <= PLAIN or any(map(_IS_NEG, leaves)) or any(map(_IS_CONJ, leaves)):
            return super().take(leaves)
        known = described(leaves)
        sources = list(leaves)
        for index in known.left_out:
            sources[index] = self.prepare(leaves[index])
        return HostArrays(sources, viewed, known)

    def enter_in_place(self, leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> HostArrays:
        # The kernels describe nearly all tensors in one call, without a Python call for each. Only the others are
        # checked here.
        known = described(leaves)
        sources = list(leaves)
        for index in known.left_out:
            if not isinstance(leaves[index], torch.Tensor):
                what = typed(leaves[index])
                raise TypeError(f"{names()[index]} is {what}, beside tensors. Convert it to a tensor.")
            sources[index] = with_memory(stored(leaves[index]), partial(_name, names, index))
        check_dtypes([sources[index] for index in known.left_out], lambda: [names()[i] for i in known.left_out])
        return HostArrays(sources, viewed, known)

    def region(self, leaf: torch.Tensor) -> Region | None:
        return region(leaf)

    def write_back(self, leaf: torch.Tensor, copy: torch.Tensor) -> None:
        write_back(leaf, copy)

    def collide(self, leaves: Sequence[Any], arrays: Arrays) -> bool:
        # Compare storages: asking each tensor for its shape and strides takes longer than clipping it.
        if not isinstance(arrays, HostArrays) or not arrays.kernels:
            return any_overlap(map(stretch, leaves))
        return bool(arrays.kernels.overlap([stretch(leaves[index]) for index in arrays.left_out]))

    def writable(self, leaves: Sequence[torch.Tensor]) -> bool:
        return all(map(writable, leaves))

    def wrote(self, leaves: Sequence[torch.Tensor]) -> None:
        # The kernels write behind autograd's back. The version counter makes a backward pass that needs the old values
        # fail.
        torch.autograd.graph.increment_version(leaves)

    def copies(self, arrays: Arrays) -> list[Any]:
        return [tensor.clone() for tensor in arrays.sources] if self._plainly(arrays) else super().copies(arrays)

    def copied(self, arrays: Arrays) -> HostArrays:
        return self.enter(self.copies(arrays)) if self._plainly(arrays) else super().copied(arrays)

    def _plainly(self, arrays: Arrays) -> bool:
        """Say whether no tensor needs a NumPy view. Views would take as long as everything else."""
        return self._all_known(arrays) and not isinstance(arrays.sources[0], HostArray)

    def places_for(self, arrays: Arrays) -> tuple[list[Any], Any]:
        if self._plainly(arrays):
            results = list(map(torch.empty_like, arrays.sources))
            targets = described(results)
            same_order = split(arrays)[0].in_order and not targets.left_out and targets.kernels.in_order
            same_order = same_order or all(
                x.stride() == y.stride() for x, y in zip(arrays.sources, results, strict=True)
            )
            if same_order and not targets.left_out:
                return results, targets.kernels
        return super().places_for(arrays)

    def leave_all(self, arrays: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        dense = set(map(type, arrays)) <= PLAIN and set(map(type, leaves)) <= PLAIN
        if dense and {leaf.layout for leaf in leaves} <= _STRIDED:
            return list(arrays)
        return super().leave_all(arrays, leaves)

    def leave(self, array: HostArray | torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        return restored(array if isinstance(array, torch.Tensor) else unviewed(array), leaf)

    def scalar(self, value: float | torch.Tensor, near: Sequence[torch.Tensor]) -> Any:
        # PyTorch warns when a tensor with a graph is converted to a number.
        return super().scalar(value.detach() if isinstance(value, torch.Tensor) else value, near)

    def leave_count(self, flags: Any, leaves: Sequence[Any]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(super().leave_count(flags, leaves)))

    def booleans(self, mask: object) -> np.ndarray:
        return tensor_of(mask).to(torch.bool).numpy()

    def leave_sum(self, wide: np.ndarray, x: HostArray, dtype: str | None) -> torch.Tensor:
        return torch.from_numpy(np.asarray(super().leave_sum(wide, x, dtype)))

    def leave_scalar(self, value: Any, dtype: str, leaves: Sequence[Any]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(super().leave_scalar(value, dtype, leaves)))

    def leave_each(self, values: Any, dtype: str, leaves: Sequence[Any]) -> list[torch.Tensor]:
        # Split one tensor: creating a tensor for each entry takes three times as long.
        if isinstance(values, np.ndarray):
            return list(torch.from_numpy(values.astype(dtype)).unbind())
        flat = [value.reshape(-1) for value in values]
        together = torch.from_numpy((np.concatenate(flat) if len(flat) > 1 else flat[0]).astype(dtype))
        parts = zip(together.split([value.size for value in values]), values, strict=True)
        return [part if value.ndim == 1 else part.view(value.shape) for part, value in parts]

    def differentiable(self, function: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        return partial(call_differentiably, function, rule)


_checked: type[HostBackend] = TorchHost


def _any_requires_grad(leaves: Sequence[Any]) -> bool:
    try:
        return any(map(_REQUIRES_GRAD, leaves))
    except AttributeError:  # a number
        return any(getattr(leaf, "requires_grad", False) for leaf in leaves)


def _name(names: Callable[[], Sequence[str]], index: int) -> str:
    return names()[index]
