"""Many norms of one tensor, and sums over the examples of a batch, on an accelerator: few operations, few bytes.

A norm is one reduction, `torch.linalg.vector_norm` in float64. PyTorch promises no order of additions, and need not:
whatever it is, a term of a sum of n takes part in n - 1 additions at most, which is the bound that `sum_error` states.
Where a norm must be the same to the last bit whatever else is measured (for sums of integers, on a grid), the order is
that of `halving_sum`.

A sum over examples is one product in float64 and one sum. What an example that is left out holds may be NaN or an
infinity, and 0 * NaN is NaN. So its weight is NaN, all its products are, and `torch.nansum` passes over NaN. An example
that is to spoil the sum adds its NaN afterwards, to the sum.

The reductions read float64 alone, in PyTorch: narrower numbers they copy. So both take a block of rows after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gradclip.backends.arrays import Arrays
from gradclip.backends.formats import FLOAT64
from gradclip.backends.portable import Portable
from gradclip.backends.protocols import Scope
from gradclip.backends.sums import filled, halving_sum, over_examples, times

if TYPE_CHECKING:
    from gradclip.core.coefficient import Coefficient, Factors

_BLOCK = 1 << 22  # elements: their float64 copy takes 32 MiB, where one of the batch might not fit


_Reader = Callable[[torch.Tensor], torch.Tensor]


class Zeroed(Arrays):
    """Arrays whose elements that are not finite count as zeros, in norms and sums of examples."""


class Examples(Portable):
    """Norms of which one tensor has many, and sums over examples."""

    def power_sum(self, arrays: Arrays, p: float, scope: Scope, divisor: torch.Tensor | None = None) -> torch.Tensor:
        if p != 2 or not self._fuses(arrays, scope):
            return super().power_sum(arrays, p, scope, divisor)
        read = _reader(arrays)
        norms = [self._norms(part, 2.0, scope, divisor, read) for x in arrays for part in self.parts(x)]
        together = torch.stack(self.gather(norms))
        return torch.sum(together * together, 0)

    def largest(self, arrays: Arrays, scope: Scope) -> torch.Tensor:
        if arrays.any_complex or not self._fuses(arrays, scope):
            return super().largest(arrays, scope)
        read = _reader(arrays)
        norms = [self._norms(x, math.inf, scope, None, read) for x in filled(arrays, scope)]
        return torch.amax(torch.stack(self.gather(norms)), 0)

    def _fuses(self, arrays: Arrays, scope: Scope) -> bool:
        """Say whether a tensor has many norms, in float64, which may depend on how many in the last bits."""
        return self.wide is FLOAT64 and not scope.fixed and all(scope.own_axes(x.ndim) for x in arrays)

    def _norms(
        self, x: torch.Tensor, p: float, scope: Scope, divisor: torch.Tensor | None, read: _Reader
    ) -> torch.Tensor:
        """Return the norms of one real tensor, over divisors if there are any."""
        first, shared = scope.own_axes(x.ndim)[0], scope.shared_axes(x.ndim)
        found = []
        for b in _blocks(x, first):
            # One layout for all, in which an example has the same norm however it lies in memory.
            some = read(_block(x, b, first)).contiguous()
            if divisor is not None:
                some = some / scope.over(_block(divisor.to(x.device), b), some)
            norm = torch.linalg.vector_norm(some, p, shared, dtype=torch.float64) if shared else self.magnitude(some)
            found.append(norm)
        return found[0] if len(found) == 1 else torch.cat(found)

    def power_sum_of(self, x: torch.Tensor, p: float, scope: Scope, divisor: torch.Tensor | None) -> torch.Tensor:
        own = scope.own_axes(x.ndim)
        if not own:
            divisor = divisor.to(x.device) if divisor is not None else None
            return super().power_sum_of(x, p, scope, divisor)
        sums = []
        for b in _blocks(x, own[0]):
            part = None if divisor is None else _block(divisor, b)
            sums.append(super().power_sum_of(_block(x, b, own[0]), p, scope, part))
        return torch.cat(sums)

    def sum_shared(self, wide: torch.Tensor, scope: Scope) -> torch.Tensor:
        """Return the sum over the axes that share a norm, in an order that does not depend on how many there are."""
        if not scope.own_axes(wide.ndim):
            return super().sum_shared(wide, scope)
        return halving_sum(self.xp, wide, scope.shared_axes(wide.ndim))

    def zeroed(self, arrays: Arrays) -> Arrays:
        # An element goes as a whole, not the part of a complex one that is not finite.
        if arrays.any_complex or self.wide is not FLOAT64:
            return self.without_nonfinite(arrays)
        # Each block when it is read: a copy of the whole batch would be as large as the batch.
        return Zeroed(arrays.items, arrays.dtypes)

    def weighted_sums(self, arrays: Arrays, coefficient: Coefficient) -> list[torch.Tensor]:
        if self.wide is not FLOAT64:
            return super().weighted_sums(arrays, coefficient)
        read, weights, blank = _reader(arrays), coefficient.weights(self.xp), coefficient.blank
        spoiling = torch.sum(torch.where(blank, 0.0, weights.first * 0.0))
        weights = replace(weights, first=torch.where(blank, math.nan, weights.first))
        return [self._skipping_nan(x, weights, read) + spoiling.to(x.device) for x in arrays]

    def _skipping_nan(self, x: torch.Tensor, weights: Factors, read: _Reader) -> torch.Tensor:
        """Return the sum over examples of each times its weight; one whose weight is NaN adds nothing."""
        mine = moved(weights, x.device)

        def add(part: torch.Tensor, block: slice | None) -> torch.Tensor:
            return torch.nansum(times(read(_block(part, block)), _rows(mine, block), over_examples), 0)

        return self.join([_over_blocks(partial(add, part), part) for part in self.parts(x)], x)

    def weighted_sum(self, x: torch.Tensor, coefficient: Coefficient) -> torch.Tensor:
        add = super().weighted_sum
        return _over_blocks(lambda b: add(_block(x, b), _rows(coefficient, b)), x)

    def rounded_sum(self, x: torch.Tensor, coefficient: Coefficient) -> torch.Tensor:
        add = super().rounded_sum
        return _over_blocks(lambda b: add(_block(x, b), _rows(coefficient, b)), x)


def moved(coefficient: Any, device: torch.device) -> Any:
    """Return the coefficient, or factors, with its scalars on `device`."""
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


def _rows(coefficient: Any, block: slice | None) -> Any:
    return coefficient if block is None else mapped(coefficient, lambda value: value[block])


def _reader(arrays: Arrays) -> _Reader:
    """Return what makes of a block the numbers that count."""
    return partial(torch.nan_to_num, nan=0.0, posinf=0.0, neginf=0.0) if isinstance(arrays, Zeroed) else lambda x: x


def _block(x: torch.Tensor, block: slice | None, axis: int = 0) -> torch.Tensor:
    return x if block is None else x[(*[slice(None)] * axis, block)]


def _over_blocks(add: Callable[[slice | None], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return the sum of what `add` returns for each block of rows."""
    first, *others = _blocks(x)
    total = add(first)
    for block in others:
        total += add(block)
    return total


def _blocks(x: torch.Tensor, axis: int = 0) -> Sequence[slice | None]:
    """Return slices of an axis of which each holds at most some `_BLOCK` elements, one row at least; None is all."""
    rows = max(1, _BLOCK // max(1, math.prod(x.shape[:axis] + x.shape[axis + 1 :])))
    if rows >= x.shape[axis]:
        return [None]
    return [slice(start, start + rows) for start in range(0, x.shape[axis], rows)]
