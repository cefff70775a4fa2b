"""PyTorch's multi-tensor operations: one call for all tensors of a device and dtype, instead of several for each.

`torch._foreach_norm` with `dtype=torch.float64` accumulates in float64 on CUDA (`ForeachReduceOp.cu`), and writes
nothing but the norms. Devices order the additions differently, so the bounds here hold for any order.
`torch._foreach_mul_` has a fast path only where the factor has the tensors' dtype. In its slow path CUDA rounds a
scalar of another dtype to that of the tensor, to nearest: so the half types are multiplied in other ways.

One operation may launch a kernel for each tensor: it does so for bfloat16, and where each tensor has its own factor.
PyTorch's own optimizers stand on these operations. Their names are private, but the same from 2.6 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gradclip.backends.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Format, dtype_name, format_of
from gradclip.backends.torch.tensors import PLAIN, put_all, writable
from gradclip.backends.values import AtOnce

if TYPE_CHECKING:
    from gradclip.backends.arrays import Arrays
    from gradclip.core.nearest import Multiplier

_TYPES = PLAIN | {FakeTensor}
_FORMATS = {torch.float64: FLOAT64, torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
_HALVES = (torch.float16, torch.bfloat16)
_UNSCALES = ("cuda", "cpu", "meta", "xpu")  # devices that have what GradScaler unscales with
# Before 2.13 the CUDA kernels count the elements of a tensor in 32 bits.
_MOST = 2**63 - 1 if torch.__version__ >= (2, 13) else 2**31 - 1


class MultiTensor:
    """Tensors, by their places in a list, of which those that share a device and a dtype are taken together."""

    elements: Mapping[Format, int]

    def __init__(self, kinds: Sequence[Sequence[int]], elements: dict[Format, int], largest: int) -> None:
        self._kinds = kinds
        self.elements = elements
        self.largest = largest

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> MultiTensor | None:
        """Sort tensors by device and dtype. None where there are none, or one is out of the ordinary."""
        if not tensors or not ordinary(tensors):
            return None
        found: dict[Any, list[int]] = {}
        for index, x in enumerate(tensors):
            found.setdefault((x.device, x.dtype), []).append(index)
        counts = [x.numel() for x in tensors]
        of_dtype = {dtype: 0 for _, dtype in found}
        for (_, dtype), kind in found.items():
            of_dtype[dtype] += sum([counts[index] for index in kind])
        elements = {_FORMATS[dtype]: of_dtype[dtype] for dtype in _FORMATS if dtype in of_dtype}
        return cls(list(found.values()), elements, max(counts))

    def norms(
        self, arrays: Arrays, p: float, device: torch.device, divisor: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the norms of the tensors as a float64 vector on a device.

        They come in the order of the tensors where these lie on one device. The tensors are divided first where
        there is a divisor, a float64 scalar, or a vector with one for each of them.
        """
        found: dict[int, torch.Tensor] = {}
        zero: torch.Tensor | None = None
        for kind in self._kinds:
            # Some releases raise for the largest magnitude of no elements.
            filled = [index for index in kind if arrays[index].numel()]
            if len(filled) < len(kind):
                zero = torch.zeros((), dtype=torch.float64, device=device) if zero is None else zero
                found.update((index, zero) for index in set(kind).difference(filled))
            if not filled:
                continue
            some = [arrays[index] for index in filled]
            if divisor is not None:
                some = torch._foreach_div(some, _each(divisor.to(some[0].device, some[0].dtype), filled))
            found.update(zip(filled, torch._foreach_norm(some, p, dtype=torch.float64), strict=True))
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for index in sorted(found):
            by_device.setdefault(found[index].device, []).append(found[index])
        # Stacked before they move: one copy for each device, and no waiting for one after the other.
        vectors = [sent(torch.stack(some), device) for some in by_device.values()]
        return vectors[0] if len(vectors) == 1 else torch.cat(vectors)

    def clear(self, arrays: Arrays) -> None:
        without_nonfinite_(arrays.items)

    def multiplied(self, arrays: Arrays, by: Multiplier) -> list[torch.Tensor]:
        return self._products(arrays, by, lambda _, some: _one_for_all(some, by))

    def multiplied_each(self, arrays: Arrays, by: Multiplier, sizes: Sequence[int]) -> list[torch.Tensor]:
        layer_of = [layer for layer, size in enumerate(sizes) for _ in range(size)]

        def factors(kind: Sequence[int], some: Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
            vector = _one_for_all(some, by)
            return _each(vector.view(-1, 1) if some[0].dtype in _HALVES else vector, [layer_of[i] for i in kind])

        return self._products(arrays, by, factors)

    def update(self, leaves: Sequence[Any], arrays: Arrays, new: Arrays, by: Multiplier) -> Sequence[Any]:
        if not all(map(writable, leaves)):
            return put_all(leaves, arrays, self.multiplied(new, by))
        for kind in self._kinds:
            some = [arrays[index] for index in kind]
            if new is not arrays:
                torch._foreach_copy_(some, [new[index] for index in kind])
            _multiply(some, _one_for_all(some, by))
            if by.blanks:
                without_nonfinite_(some)
        return leaves

    def clamp(self, arrays: Arrays, bound: float) -> None:
        """Clamp the tensors to [-bound, bound] where they lie, the bound rounded toward zero in their dtype."""
        for kind in self._kinds:
            some = [arrays[index] for index in kind]
            limit = format_of(some[0]).toward_zero(bound)
            torch._foreach_clamp_max_(some, limit)
            torch._foreach_clamp_min_(some, -limit)

    def clamped(self, arrays: Arrays, bound: float) -> list[torch.Tensor]:
        """Return the tensors so clamped."""

        def clamped(_: Sequence[int], some: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            limit = format_of(some[0]).toward_zero(bound)
            results = torch._foreach_clamp_max(some, limit)
            torch._foreach_clamp_min_(results, -limit)
            return results

        return self._made(arrays, clamped)

    def _products(
        self,
        arrays: Arrays,
        by: Multiplier,
        factors: Callable[[Sequence[int], Sequence[torch.Tensor]], torch.Tensor | list[torch.Tensor]],
    ) -> list[torch.Tensor]:
        def products(kind: Sequence[int], some: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            factor = factors(kind, some)
            if some[0].dtype in _HALVES:
                # They would come back in float32. Times a number of the host they are only copied.
                results = torch._foreach_mul(some, 1.0)
                _multiply(results, factor)
            else:
                results = torch._foreach_mul(some, factor)
            if by.blanks:
                without_nonfinite_(results)
            return results

        return self._made(arrays, products)

    def _made(
        self, arrays: Arrays, make: Callable[[Sequence[int], Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Return what is made of the tensors of each device and dtype, in the order of all."""
        made = list(arrays)
        for kind in self._kinds:
            for index, result in zip(kind, make(kind, [arrays[index] for index in kind]), strict=True):
                made[index] = result
        return made


_checked: type[AtOnce] = MultiTensor


def sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device. The host must not read it before it has come."""
    return x.to(device, non_blocking=device.type != "cpu")


def ordinary(tensors: Sequence[Any]) -> bool:
    """Say whether these are dense tensors of PyTorch itself, fake ones among them, of real numbers."""
    return set(map(type, tensors)) <= _TYPES and all(map(_is_ordinary, tensors))


def _is_ordinary(x: torch.Tensor) -> bool:
    if x.layout is not torch.strided or not x.is_floating_point() or x.numel() > _MOST:
        return False
    # Compiled code has no way to ask, and meets no such tensors.
    return torch.compiler.is_compiling() or not (x.is_neg() or x._is_zerotensor())


def without_nonfinite_(tensors: Sequence[torch.Tensor]) -> None:
    """Put zeros in place of NaN and the infinities: there is no multi-tensor operation that does."""
    for x in tensors:
        x.nan_to_num_(0.0, 0.0, 0.0)


def _each(values: torch.Tensor, indices: Sequence[int]) -> torch.Tensor | list[torch.Tensor]:
    """Return the entries of a vector at some indices; a scalar as it is."""
    if not values.ndim:
        return values
    entries = values.unbind()
    return [entries[index] for index in indices]


def _one_for_all(some: Sequence[torch.Tensor], by: Multiplier) -> torch.Tensor:
    factor: torch.Tensor = by.factors[dtype_name(some[0])]
    return sent(factor, some[0].device)


def _multiply(some: Sequence[torch.Tensor], by: torch.Tensor | list[torch.Tensor]) -> None:
    """Multiply tensors of one device and dtype by one scalar, or each by its own, half types by vectors of one element.

    The factor is float64 for float64, else float32, and each product is rounded to the tensors' dtype once more.
    """
    dtype = some[0].dtype
    if isinstance(by, torch.Tensor) and dtype is torch.float16 and some[0].device.type in _UNSCALES:
        # What GradScaler unscales with: it multiplies in float32, and leaves alone what it would multiply by 1.
        torch._amp_foreach_non_finite_check_and_unscale_(some, torch.zeros_like(by), by)
    elif isinstance(by, torch.Tensor) and dtype not in _HALVES:
        torch._foreach_mul_(some, by)
    else:
        # A vector of one element takes part in the choice of the dtype that is multiplied in; a scalar does not.
        factors = [by.reshape(1)] * len(some) if isinstance(by, torch.Tensor) else by
        torch._foreach_mul_([x if x.ndim else x.view(1) for x in some], factors)
