"""PyTorch's multi-tensor operations: one call for all tensors of a device and dtype.

`torch._foreach_norm` with `dtype=torch.float64` accumulates in float64 on CUDA (`ForeachReduceOp.cu`) and writes only
the norms. Devices add in different orders, so the bounds here hold for any order. `torch._foreach_mul_` has a fast path
only if the factor has the tensors' dtype. Its slow path on CUDA rounds a scalar of another dtype to the tensors' dtype,
to nearest, so half types are multiplied in other ways.

float16 is multiplied by the operation that GradScaler uses, in float32. From 2.6 to 2.13 its CUDA kernel has no
bfloat16 (`AmpKernels.cu`). So bfloat16 is multiplied by a bfloat16 number, then divided by one, and `one_factor` proves
the bound. That reads and writes the tensors twice. So a tensor that takes the device longer than the host needs for a
launch is multiplied by a launch of its own, in float32.

Each tensor has a launch of its own too if it has its own factor. PyTorch's own optimizers use these operations. Their
names are private, but unchanged from 2.6 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradclip._src.backends.torch.tensors import KNOWN, sent
from gradclip._src.core.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Format, dtype_name, format_of

if TYPE_CHECKING:
    from gradclip._src.core.arrays import Arrays
    from gradclip._src.core.rules import OneFactor

_FORMATS = {torch.float64: FLOAT64, torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
_HALVES = (torch.float16, torch.bfloat16)
# The devices on which the operation that GradScaler uses to unscale takes tensors of a dtype.
_UNSCALES = {torch.float16: ("cuda", "cpu", "meta", "xpu"), torch.bfloat16: ("xpu",)}
# The devices on which bfloat16 is multiplied in two steps: CUDA, and the CPU, where tests emulate it.
_TWO_STEPS = ("cuda", "cpu")
# Two steps take about nine launches. A launch takes the host about 5 us, in which a GPU reads and writes 2**21 numbers.
_FEW, _LARGE = 8, 2**21
# Before 2.13, the CUDA kernels count a tensor's elements in 32 bits.
_MOST = 2**63 - 1 if torch.__version__ >= (2, 13) else 2**31 - 1


class MultiTensor:
    """Tensors grouped by device and dtype, as lists of indices.

    Complex tensors are treated as real ones made of their parts, which have the same norm of order 2.
    """

    elements: Mapping[Format, int]  # the number of elements of each format, the widest first

    def __init__(
        self, kinds: Sequence[Sequence[int]], elements: dict[Format, int], largest: int, any_complex: bool
    ) -> None:
        self._kinds = kinds
        self._complex = any_complex
        self.elements = elements
        self.largest = largest

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> MultiTensor | None:
        """Group tensors by device and dtype. None if there are no tensors, or any is not ordinary."""
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
        kinds = list(found.values())
        if torch.compiler.is_compiling() and not tensors[0].is_cpu:
            kinds = [part for kind in kinds for part in _compiled(kind, counts)]
        return cls(kinds, elements, max(counts), any_complex)

    def norms(
        self, arrays: Arrays, p: float, device: torch.device, divisor: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the norms of the tensors as a float64 vector on a device.

        If all tensors are on one device, the norms are in the tensors' order. With a divisor, the tensors are divided
        first. It is a float64 scalar, or a vector with one entry for each tensor.
        """
        found: dict[int, torch.Tensor] = {}
        zero: torch.Tensor | None = None
        for kind in self._kinds:
            # Some PyTorch releases raise an error for the maximum of no elements.
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
        # Stack before moving: one copy per device, and no waiting for one device after another.
        vectors = [sent(torch.stack(some), device) for some in by_device.values()]
        return vectors[0] if len(vectors) == 1 else torch.cat(vectors)

    def multiplied(self, arrays: Arrays, by: OneFactor) -> list[torch.Tensor]:
        """Return the tensors, multiplied."""

        def products(kind: Sequence[int], some: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            if some[0].dtype not in _HALVES:
                values = by.factors[dtype_name(some[0])]
                results = torch._foreach_mul(some, _numbers(values, some, kind, by.sizes))
                if by.blanks:
                    _blank(results, by, kind)
                return results
            return _products_of_halves(some, by, kind)

        return self._made(arrays, products)

    def multiply(self, arrays: Arrays, new: Arrays, by: OneFactor) -> None:
        """Multiply the tensors in place, from the values in `new`."""
        for kind in self._kinds:
            some = self._some(arrays, kind)
            if new is not arrays:
                torch._foreach_copy_(some, self._some(new, kind))
            _multiply(some, by, kind)

    def clamp(self, arrays: Arrays, bound: float) -> None:
        """Clamp the tensors in place to [-bound, bound], the bound rounded toward zero in their dtype."""
        for kind in self._kinds:
            some = self._some(arrays, kind)
            limit = format_of(some[0]).toward_zero(bound)
            torch._foreach_clamp_max_(some, limit)
            torch._foreach_clamp_min_(some, -limit)

    def clamped(self, arrays: Arrays, bound: float) -> list[torch.Tensor]:
        """Return the clamped tensors."""

        def clamped(_: Sequence[int], some: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            limit = format_of(some[0]).toward_zero(bound)
            results = torch._foreach_clamp_max(some, limit)
            torch._foreach_clamp_min_(results, -limit)
            return results

        return self._made(arrays, clamped)

    def _made(
        self, arrays: Arrays, make: Callable[[Sequence[int], Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Return the results of `make` for the tensors of each device and dtype, in the original order."""
        made = list(arrays)
        for kind in self._kinds:
            for index, result in zip(kind, make(kind, self._some(arrays, kind)), strict=True):
                made[index] = _like(result, made[index]) if self._complex else result
        return made

    def _some(self, arrays: Arrays, kind: Sequence[int]) -> list[torch.Tensor]:
        """Return the tensors at these indices, complex ones as their parts."""
        some = [arrays[index] for index in kind]
        return list(map(_real, some)) if self._complex else some


def ordinary(tensors: Sequence[Any]) -> bool:
    """Say whether all are plain dense PyTorch tensors (or fake ones) with every element stored."""
    return set(map(type, tensors)) <= KNOWN and all(map(_is_ordinary, tensors))


def _compiled(kind: list[int], counts: Sequence[int]) -> list[list[int]]:
    """Give each tensor of one element a list of its own.

    PyTorch's compiler for GPUs (2.11, 2.13) may compute the coefficient in the kernel of such a tensor's product, and
    not for the other products of that kernel, which read it.
    """
    several = [index for index in kind if counts[index] != 1]
    return [*([several] if several else []), *([index] for index in kind if counts[index] == 1)]


def _is_ordinary(x: torch.Tensor) -> bool:
    compiling, floating = torch.compiler.is_compiling(), x.is_floating_point()
    # Compilers generate no kernels for complex numbers.
    known = floating or (x.is_complex() and not compiling)
    if x.layout is not torch.strided or not known or x.numel() * (1 if floating else 2) > _MOST:
        return False
    # Compiled code cannot check this, and never gets such tensors.
    return compiling or not (x.is_neg() or x._is_zerotensor() or x.is_conj())


def without_nonfinite_(tensors: Sequence[torch.Tensor]) -> None:
    """Replace NaN and infinities by zeros in place. There is no multi-tensor operation for this."""
    for x in tensors:
        if x.is_complex():  # zero the whole element, not only its non-finite part
            parts = torch.view_as_real(x)
            x.masked_fill_((parts - parts).any(-1), 0.0)  # NaN, which is true, for a non-finite part
        else:
            x.nan_to_num_(0.0, 0.0, 0.0)


def _real(x: torch.Tensor) -> torch.Tensor:
    """Return a real tensor. A complex tensor is viewed as its parts."""
    return torch.view_as_real(x) if x.is_complex() else x


def _like(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Convert a result for a tensor's parts back to the form of the tensor."""
    return torch.view_as_complex(result) if x.is_complex() else result


def _each(values: torch.Tensor, indices: Sequence[int]) -> torch.Tensor | list[torch.Tensor]:
    """Return the entries or rows of a vector at these indices. A scalar stays the same."""
    if not values.ndim:
        return values
    entries = values.unbind()
    return [entries[index] for index in indices]


def _numbers(
    values: torch.Tensor, some: Sequence[torch.Tensor], kind: Sequence[int], sizes: Sequence[int] | None
) -> torch.Tensor | list[torch.Tensor]:
    """Return the factor of the tensors at the indices `kind`: one for all, or one for each."""
    here = sent(values, some[0].device)
    if sizes is None:
        return here
    layer_of = [layer for layer, size in enumerate(sizes) for _ in range(size)]
    return _each(here, [layer_of[index] for index in kind])


def _multiply(some: Sequence[torch.Tensor], by: OneFactor, kind: Sequence[int]) -> None:
    """Multiply tensors of one device and dtype in place. `kind` are their indices."""
    together, alone = _in_two_steps(some, by)
    if together:
        small = [some[place] for place in together]
        factor, divisor = _factor_and_divisor(by.factors["bfloat16"], small[0].device)
        torch._foreach_mul_(small, factor)
        torch._foreach_div_(small, divisor)
    if alone:
        _multiply_in_float32([some[place] for place in alone], by, [kind[place] for place in alone])
    _finish(some, by, kind)


def _products_of_halves(some: Sequence[torch.Tensor], by: OneFactor, kind: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return the products of tensors of a half type."""
    results = list(some)
    together, alone = _in_two_steps(some, by)
    if together:
        factor, divisor = _factor_and_divisor(by.factors["bfloat16"], some[0].device)
        products = torch._foreach_mul([some[place] for place in together], factor)
        torch._foreach_div_(products, divisor)
        _put(results, together, products)
    if alone:
        # The products would be float32. Multiplying by a Python number just copies the tensors.
        products = torch._foreach_mul([some[place] for place in alone], 1.0)
        _multiply_in_float32(products, by, [kind[place] for place in alone])
        _put(results, alone, products)
    _finish(results, by, kind)
    return results


def _put(results: list[torch.Tensor], places: Sequence[int], products: Sequence[torch.Tensor]) -> None:
    for place, product in zip(places, products, strict=True):
        results[place] = product


def _in_two_steps(some: Sequence[torch.Tensor], by: OneFactor) -> tuple[Sequence[int], Sequence[int]]:
    """Return the positions of the tensors that are multiplied in two steps, and those of the others.

    Compiled code is not split: compilers make few kernels of many multiplications, and compute them in float32.
    """
    everything, first = range(len(some)), some[0]
    possible = first.dtype is torch.bfloat16 and by.sizes is None and first.device.type in _TWO_STEPS
    if not possible or torch.compiler.is_compiling():
        return (), everything
    together = [place for place in everything if some[place].numel() < _LARGE]
    if len(together) <= _FEW:
        return (), everything
    return together, [place for place in everything if some[place].numel() >= _LARGE]


def _factor_and_divisor(c: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return f and S of `one_factor`, in bfloat16 and on a device, for a float32 scalar c.

    The upper half of a float32 number is that number in bfloat16, rounded toward zero. So no operation is needed for f.
    If c is 0 or so small that 1 / c is infinite, S is 1. If c is NaN, so is one of the two.
    """
    factor = _upper_half(c)
    raised = c.reciprocal().view(torch.int32) + 2**16  # the next bfloat16 number after 1 / c, with some bits more
    divides = (raised & 2**22) != 0  # the significand is at least 1.5
    one = torch.ones_like(factor)  # a number of the host would be copied to the device
    factor, divisor = torch.where(divides, one, factor), torch.where(divides, _upper_half(raised), one)
    return sent(factor, device), sent(divisor, device)


def _upper_half(x: torch.Tensor) -> torch.Tensor:
    """Return the upper 16 bits of each number as a bfloat16 number. Devices store the lower half first."""
    return x.unsqueeze(-1).view(torch.bfloat16).unbind(-1)[1]


def _multiply_in_float32(some: Sequence[torch.Tensor], by: OneFactor, kind: Sequence[int]) -> None:
    """Multiply tensors in place by a float32 factor, or float64 tensors by a float64 one. Products are rounded."""
    dtype, values = some[0].dtype, by.factors[dtype_name(some[0])]
    if by.sizes is None and some[0].device.type in _UNSCALES.get(dtype, ()):
        # The operation GradScaler uses to unscale: it multiplies in float32, and changes nothing if the factor is 1.
        factor = sent(values, some[0].device)
        torch._amp_foreach_non_finite_check_and_unscale_(some, torch.zeros_like(factor), factor)
    elif dtype not in _HALVES:
        torch._foreach_mul_(some, _numbers(values, some, kind, by.sizes))
    else:
        # A one-element vector takes part in type promotion, so products are computed in float32. A scalar does not.
        found = _numbers(values.reshape(-1, 1) if by.sizes else values.reshape(1), some, kind, by.sizes)
        factors = [found] * len(some) if isinstance(found, torch.Tensor) else found
        torch._foreach_mul_([x if x.ndim else x.view(1) for x in some], factors)


def _finish(some: Sequence[torch.Tensor], by: OneFactor, kind: Sequence[int]) -> None:
    """Do what follows the multiplication, in place."""
    if by.steps is not None and some[0].dtype is torch.float16:
        _step(some, _numbers(by.steps.to(torch.float16), some, kind, by.sizes))
    if by.blanks:
        _blank(some, by, kind)


def _blank(some: Sequence[torch.Tensor], by: OneFactor, kind: Sequence[int]) -> None:
    """Make zeros of tensors whose norm is not finite: the bits of a number times 0 are those of zero, also for NaN."""
    bits = _BITS[some[0].dtype]
    torch._foreach_mul_([x.view(bits) for x in some], _numbers(by.alive.to(bits), some, kind, by.sizes))


def _step(some: Sequence[torch.Tensor], steps: torch.Tensor | list[torch.Tensor]) -> None:
    """Move float16 numbers one step toward zero where `steps` is -1. A step of 0 leaves all bits unchanged."""
    moves = torch._foreach_clamp_max(some, FLOAT16.step)
    torch._foreach_clamp_min_(moves, -FLOAT16.step)
    torch._foreach_mul_(moves, steps)
    torch._foreach_add_(some, moves)
