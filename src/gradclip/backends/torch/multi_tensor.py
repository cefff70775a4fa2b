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
    """Tensors, by their places in a list, of which those that share a device and a dtype are taken together.

    Complex ones are taken as their parts, real numbers: these have the same norm of order 2.
    """

    elements: Mapping[Format, int]

    def __init__(
        self, kinds: Sequence[Sequence[int]], elements: dict[Format, int], largest: int, any_complex: bool
    ) -> None:
        self._kinds = kinds
        self._complex = any_complex
        self.elements = elements
        self.largest = largest

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> MultiTensor | None:
        """Sort tensors by device and dtype. None where there are none, or one is out of the ordinary."""
        if not tensors or not ordinary(tensors):
            return None
        any_complex = any(x.is_complex() for x in tensors)
        parts = list(map(_real, tensors)) if any_complex else tensors
        found: dict[Any, list[int]] = {}
        for index, x in enumerate(parts):
            found.setdefault((x.device, x.dtype), []).append(index)
        counts = [x.numel() for x in parts]
        of_dtype = {dtype: 0 for _, dtype in found}
        for (_, dtype), kind in found.items():
            of_dtype[dtype] += sum([counts[index] for index in kind])
        elements = {_FORMATS[dtype]: of_dtype[dtype] for dtype in _FORMATS if dtype in of_dtype}
        return cls(list(found.values()), elements, max(counts), any_complex)

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
            some = self._some(arrays, filled)
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
        def products(kind: Sequence[int], some: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            if some[0].dtype not in _HALVES:
                values = by.factors[dtype_name(some[0])]
                results = torch._foreach_mul(some, _numbers(values, some, kind, by.sizes))
                if by.blanks:
                    without_nonfinite_(results)
                return results
            # They would come back in float32. Times a number of the host they are only copied.
            results = torch._foreach_mul(some, 1.0)
            _multiply(results, by, kind)
            return results

        return self._made(arrays, products)

    def update(self, leaves: Sequence[Any], arrays: Arrays, new: Arrays, by: Multiplier) -> Sequence[Any]:
        if not all(map(writable, leaves)):
            return put_all(leaves, arrays, self.multiplied(new, by))
        for kind in self._kinds:
            some = self._some(arrays, kind)
            if new is not arrays:
                torch._foreach_copy_(some, self._some(new, kind))
            _multiply(some, by, kind)
        return leaves

    def clamp(self, arrays: Arrays, bound: float) -> None:
        """Clamp the tensors to [-bound, bound] where they lie, the bound rounded toward zero in their dtype."""
        for kind in self._kinds:
            some = self._some(arrays, kind)
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

    def _made(
        self, arrays: Arrays, make: Callable[[Sequence[int], Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Return what is made of the tensors of each device and dtype, in the order of all."""
        made = list(arrays)
        for kind in self._kinds:
            for index, result in zip(kind, make(kind, self._some(arrays, kind)), strict=True):
                made[index] = _like(result, made[index]) if self._complex else result
        return made

    def _some(self, arrays: Arrays, kind: Sequence[int]) -> list[torch.Tensor]:
        """Return the tensors at some places, complex ones as their parts."""
        some = [arrays[index] for index in kind]
        return list(map(_real, some)) if self._complex else some


_checked: type[AtOnce] = MultiTensor


def sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device. The host must not read it before it has come."""
    return x.to(device, non_blocking=device.type != "cpu")


def ordinary(tensors: Sequence[Any]) -> bool:
    """Say whether these are dense tensors of PyTorch itself, fake ones among them, of which each element is stored."""
    return set(map(type, tensors)) <= _TYPES and all(map(_is_ordinary, tensors))


def _is_ordinary(x: torch.Tensor) -> bool:
    compiling, floating = torch.compiler.is_compiling(), x.is_floating_point()
    # Compilers make no kernels for complex numbers.
    known = floating or (x.is_complex() and not compiling)
    if x.layout is not torch.strided or not known or x.numel() * (1 if floating else 2) > _MOST:
        return False
    # Compiled code has no way to ask, and meets no such tensors.
    return compiling or not (x.is_neg() or x._is_zerotensor() or x.is_conj())


def without_nonfinite_(tensors: Sequence[torch.Tensor]) -> None:
    """Put zeros in place of NaN and the infinities: there is no multi-tensor operation that does."""
    for x in tensors:
        if x.is_complex():  # an element goes as a whole, not the part that is not finite
            parts = torch.view_as_real(x)
            x.masked_fill_((parts - parts).any(-1), 0.0)  # NaN where a part is not finite, which counts as true
        else:
            x.nan_to_num_(0.0, 0.0, 0.0)


def _real(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of real numbers, a complex one as its parts, which lie there."""
    return torch.view_as_real(x) if x.is_complex() else x


def _like(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a result for the parts of a tensor as one for the tensor."""
    return torch.view_as_complex(result) if x.is_complex() else result


def _each(values: torch.Tensor, indices: Sequence[int]) -> torch.Tensor | list[torch.Tensor]:
    """Return the entries of a vector, or rows, at some indices; a scalar as it is."""
    if not values.ndim:
        return values
    entries = values.unbind()
    return [entries[index] for index in indices]


def _numbers(
    values: torch.Tensor, some: Sequence[torch.Tensor], kind: Sequence[int], sizes: Sequence[int] | None
) -> torch.Tensor | list[torch.Tensor]:
    """Return what these tensors are multiplied by, of those at the places `kind`: one number, or one for each."""
    here = sent(values, some[0].device)
    if sizes is None:
        return here
    layer_of = [layer for layer, size in enumerate(sizes) for _ in range(size)]
    return _each(here, [layer_of[index] for index in kind])


def _multiply(some: Sequence[torch.Tensor], by: Multiplier, kind: Sequence[int]) -> None:
    """Multiply tensors of one device and dtype, those at the places `kind`.

    The factor is float64 for float64, else float32, and each product is rounded to the tensors' dtype once more.
    """
    dtype, values = some[0].dtype, by.factors[dtype_name(some[0])]
    if dtype is torch.float16 and by.sizes is None and some[0].device.type in _UNSCALES:
        # What GradScaler unscales with: it multiplies in float32, and leaves alone what it would multiply by 1.
        factor = sent(values, some[0].device)
        torch._amp_foreach_non_finite_check_and_unscale_(some, torch.zeros_like(factor), factor)
    elif dtype not in _HALVES:
        torch._foreach_mul_(some, _numbers(values, some, kind, by.sizes))
    else:
        # A vector of one element takes part in the choice of the dtype that is multiplied in; a scalar does not.
        found = _numbers(values.reshape(-1, 1) if by.sizes else values.reshape(1), some, kind, by.sizes)
        factors = [found] * len(some) if isinstance(found, torch.Tensor) else found
        torch._foreach_mul_([x if x.ndim else x.view(1) for x in some], factors)
    if by.steps is not None and dtype is torch.float16:
        _step(some, _numbers(by.steps.to(dtype), some, kind, by.sizes))
    if by.blanks:
        without_nonfinite_(some)


def _step(some: Sequence[torch.Tensor], steps: torch.Tensor | list[torch.Tensor]) -> None:
    """Move numbers of float16 one step toward zero, or to it, where `steps` is -1; 0 leaves all bits as they are."""
    moves = torch._foreach_clamp_max(some, FLOAT16.step)
    torch._foreach_clamp_min_(moves, -FLOAT16.step)
    torch._foreach_mul_(moves, steps)
    torch._foreach_add_(some, moves)
