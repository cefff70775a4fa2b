"""Many norms of one tensor, and sums over the examples of a batch, on an accelerator: few operations, few bytes.

A norm is one reduction, `torch.linalg.vector_norm` in float64. PyTorch promises no order of additions, and need not:
whatever it is, a term of a sum of n takes part in n - 1 additions at most, which is the bound that `sum_error` states.
Where a norm must be the same to the last bit whatever else is measured (for sums of integers, on a grid), the order is
that of `halving_sum`.

A sum over examples is one product in float64 and one sum. What an example that is left out holds may be NaN or an
infinity, and 0 * NaN is NaN. So its weight is NaN, all its products are, and `torch.nansum` passes over NaN. An example
that is to spoil the sum adds its NaN afterwards, to the sum.

The reductions read float64 alone, in PyTorch: narrower numbers they copy. So they take one block after the other. Long
rows are a list for `torch._foreach_norm`, whose kernel on CUDA adds up in float64 what it reads in any type; short rows
would be too many for a list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradclip.backends.arrays import Arrays
from gradclip.backends.formats import FLOAT64
from gradclip.backends.portable import Portable
from gradclip.backends.sums import halving_sum
from gradclip.backends.torch.tensors import mapped
from gradclip.backends.values import Scope

if TYPE_CHECKING:
    from gradclip.core.coefficient import Coefficient
    from gradclip.core.rules import Rule

_BLOCK = 1 << 22  # elements: their float64 copy takes 32 MiB, where one of the batch might not fit
_LOWEST = 2.0**-800  # of numerators whose quotients lie in the normal range
_LARGEST = 2.0**1022  # of weights, where what is scaled to a length may be tiny

_Reader = Callable[[torch.Tensor], torch.Tensor]
_Rows = tuple[int, int]  # the first, and how many
_Axes = Callable[[int], tuple[int, ...]]


class Zeroed(Arrays):
    """Arrays whose elements that are not finite count as zeros, in norms and sums of examples."""


class _Weighed(NamedTuple):
    """The norms of examples, and what each is divided by, if by anything, and multiplied with.

    `telling` is not finite where an example is not. What is multiplied broadcasts to tensors of that many axes, if they
    all have as many, else it has one axis.
    """

    norms: torch.Tensor
    weights: torch.Tensor
    telling: torch.Tensor
    divisor: torch.Tensor | None = None


class Examples(Portable):
    """Norms of which one tensor has many, and sums over examples."""

    def power_sum(self, arrays: Arrays, p: float, scope: Scope, divisor: torch.Tensor | None = None) -> torch.Tensor:
        if p != 2 or not self._fuses(arrays, scope):
            return super().power_sum(arrays, p, scope, divisor)
        norms = self._norms(arrays, 2.0, scope.own_axes, divisor)
        return norms * norms

    def largest(self, arrays: Arrays, scope: Scope) -> torch.Tensor:
        if arrays.any_complex or not self._fuses(arrays, scope):
            return super().largest(arrays, scope)
        return self._norms(arrays, math.inf, scope.own_axes)

    def _fuses(self, arrays: Arrays, scope: Scope) -> bool:
        """Say whether a tensor has many norms, in float64, which may depend on how many in the last bits."""
        return self.wide is FLOAT64 and not scope.fixed and all(scope.own_axes(x.ndim) for x in arrays)

    def _norms(
        self, arrays: Arrays, p: float, axes: _Axes, divisor: torch.Tensor | None = None, *, keep: bool = False
    ) -> torch.Tensor:
        """Return the norms of all tensors together, over divisors if there are any; each has its own along `axes`."""
        read, found = _reader(arrays), []
        # PyTorch has no rule for a list of rows under `vmap`, and compiles each of them.
        by_row = self.visible and p == 2 and divisor is None and not isinstance(arrays, Zeroed)
        # PyTorch has no largest magnitude of no elements.
        some = [x for x in arrays if math.prod([n for axis, n in enumerate(x.shape) if axis not in axes(x.ndim)])]
        parts: list[Any] = [part for x in some or arrays[:1] for part in self.parts(x)]
        for part in parts:
            own = axes(part.ndim)
            long = by_row and own == (0,) and 0 < part.shape[0] * _BLOCK <= 8 * part.numel() and part.is_contiguous()
            found.append(_norms_of_rows(part) if long else _norms_of(part, p, own, divisor, read, keep=keep))
        here = self.gather(found)
        return here[0] if len(here) == 1 else torch.linalg.vector_norm(torch.stack(here), p, 0)

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
        factors = [torch.where(blank, math.nan, weights.first), *([] if weights.second is None else [weights.second])]
        return _spoiled([self._skipping_nan(x, factors, read) for x in arrays], weights.first, ~blank)

    def weighs_all(self, arrays: Arrays) -> bool:
        return self.wide is FLOAT64 and not any(map(self.flushed_below, arrays.formats))

    def add_examples(
        self, arrays: Arrays, weighing: Rule, mask: torch.Tensor | None, *, spoil: bool
    ) -> tuple[list[torch.Tensor], torch.Tensor] | None:
        known = isinstance(weighing.numerator, float)
        if not self.weighs_all(arrays) or (known and 0 < weighing.numerator < _LOWEST):
            return None
        scaled = FLOAT64 in arrays.formats
        if scaled and not known:
            return None
        norms, weights, telling, divisor = (self._scaled if scaled else self._plain)(arrays, weighing)
        if mask is not None:
            norms = torch.where(mask, norms, 0.0)
            weights = torch.where(_over(mask, weights.ndim), weights, math.nan)
        read = _reader(arrays)
        sums = [self._skipping_nan(x, [weights], read, divisor) for x in arrays]
        return _spoiled(sums, telling if telling.ndim == 1 else telling.reshape(-1), mask) if spoil else sums, norms

    def _plain(self, arrays: Arrays, weighing: Rule) -> _Weighed:
        """Weigh examples the squares of whose norms stay within the range: NaN is for one that is not finite."""
        norms = self._norms(arrays, 2.0, _first_axis)
        upper = weighing.upper(norms)
        weights = _quotient(weighing.numerator, upper)
        if isinstance(weighing.numerator, float):
            # The quotient falls with the norm, so that it is the smaller of the two where an example is kept.
            weights = torch.clamp(weights, max=_LARGEST if _keeps_none(weighing) else weighing.kept)
        else:
            # Numbers below the normal range may be rounded up.
            weights = torch.nn.functional.threshold(torch.clamp(weights, max=_LARGEST), FLOAT64.tiny, 0.0)
            weights = torch.where(upper <= weighing.keep_up_to, weighing.kept, weights)
        weights = _nan_beside(norms, weights)
        return _Weighed(norms, weights, weights)

    def _scaled(self, arrays: Arrays, weighing: Rule) -> _Weighed:
        """Weigh examples that are divided first, which makes the largest element about 1.

        One that is not finite is divided by NaN, or multiplied with 0, which makes NaN of an infinity.
        """
        # Weights that have the tensors' axes from the start need no view for each tensor.
        keep = len({x.ndim for x in arrays}) == 1 and arrays[0].ndim > 1
        # Neither it nor its inverse is subnormal; the squares of what is left stay within the range.
        divisor = torch.clamp(self._norms(arrays, math.inf, _first_axis, keep=keep), 2.0**-1022, 2.0**1022)
        scaled = self._norms(arrays, 2.0, _first_axis, divisor, keep=keep)
        norms = scaled * divisor
        numerator, keep_up_to = weighing.numerator / weighing.inflate, weighing.keep_up_to / weighing.inflate
        offset = weighing.offset / weighing.inflate
        weights = _quotient(numerator, scaled if offset == 0.0 else scaled + offset / divisor)
        if _keeps_none(weighing):
            weights = torch.clamp(weights, max=_LARGEST)
        else:
            # A norm beyond the range may be below an infinite threshold.
            kept = scaled <= FLOAT64.largest if keep_up_to == math.inf else norms <= keep_up_to * (1.0 - 2.0**-50)
            weights, divisor = weights.masked_fill(kept, weighing.kept), divisor.masked_fill(kept, 1.0)
        return _Weighed(norms.reshape(-1) if keep else norms, weights, scaled, divisor)

    def _skipping_nan(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], read: _Reader, divisor: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum over examples of each times its weights; one whose product is NaN adds nothing."""
        factors = [_over(weight.to(x.device), x.ndim) for weight in weights]
        over = None if divisor is None else _over(divisor.to(x.device), x.ndim)

        def add(part: torch.Tensor) -> torch.Tensor:
            # Along the longest axis of one example: the sums need not be added up once more.
            axis = max(range(1, part.ndim), key=part.shape.__getitem__, default=0)
            found = []
            for block in _blocks(part, axis) if axis else [None]:
                product = read(_block(part, block, axis))
                product = product if over is None else product / over
                for factor in factors:
                    product = product * factor
                found.append(torch.nansum(product, 0))
            return found[0] if len(found) == 1 else torch.cat(found, axis - 1)

        return self.join(list(map(add, self.parts(x))), x)

    def weighted_sum(self, x: torch.Tensor, coefficient: Coefficient) -> torch.Tensor:
        add = super().weighted_sum
        return _over_blocks(lambda b: add(_block(x, b), _rows(coefficient, b)), x)

    def rounded_sum(self, x: torch.Tensor, coefficient: Coefficient) -> torch.Tensor:
        add = super().rounded_sum
        return _over_blocks(lambda b: add(_block(x, b), _rows(coefficient, b)), x)


def _norms_of_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the norms along the first axis. On CUDA this reads what it is given, without a copy in float64."""
    return torch.stack(torch._foreach_norm(x.unbind(), 2, dtype=torch.float64))


def _norms_of(
    x: torch.Tensor, p: float, own: tuple[int, ...], divisor: torch.Tensor | None, read: _Reader, *, keep: bool
) -> torch.Tensor:
    """Return the norms of one real tensor, one for each place along its own axes."""
    shared = [axis for axis in range(x.ndim) if axis not in own]
    found = []
    for block in _blocks(x, own[0]):
        # One layout for all, in which an example has the same norm however it lies in memory.
        some = read(_block(x, block, own[0])).contiguous()
        if divisor is not None:
            shape = [n if axis in own else 1 for axis, n in enumerate(some.shape)]
            by = _block(divisor.to(x.device), block)
            some = some / (by if by.ndim == some.ndim else by.reshape(shape))
        # No axes would be all of them.
        some = some if shared else some.unsqueeze(-1)
        found.append(torch.linalg.vector_norm(some, p, shared or -1, keepdim=keep, dtype=torch.float64))
    return found[0] if len(found) == 1 else torch.cat(found)


def _over(values: torch.Tensor, ndim: int) -> torch.Tensor:
    """Shape values, one for each example, so that they broadcast to a tensor of that many axes."""
    return values if values.ndim == ndim else values.reshape(-1, *[1] * (ndim - 1))


def _spoiled(sums: Sequence[torch.Tensor], weights: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the sums, NaN where an example in the mask has the weight NaN."""
    zeros = weights * 0.0
    spoiling = torch.sum(zeros if mask is None else torch.where(mask, zeros, 0.0))
    return [total + spoiling.to(total.device) for total in sums]


def _quotient(numerator: float | torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """Return the quotient, 0 where both are 0: that is no NaN of an example."""
    if isinstance(numerator, float):
        return numerator / upper if numerator else torch.zeros_like(upper)
    return torch.where(upper > 0, numerator / upper, 0.0)


def _nan_beside(norms: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weights, NaN where a norm is not finite, for 0 * inf is NaN."""
    return torch.add(weights, norms, alpha=0.0)


def _first_axis(ndim: int) -> tuple[int, ...]:
    return (0,)


def _keeps_none(weighing: Rule) -> bool:
    return isinstance(weighing.keep_up_to, float) and weighing.keep_up_to <= 0


def _rows(coefficient: Any, block: _Rows | None) -> Any:
    return coefficient if block is None else mapped(coefficient, lambda value: _block(value, block))


def _reader(arrays: Arrays) -> _Reader:
    """Return what makes of a block the numbers that count."""
    return partial(torch.nan_to_num, nan=0.0, posinf=0.0, neginf=0.0) if isinstance(arrays, Zeroed) else lambda x: x


def _block(x: torch.Tensor, block: _Rows | None, axis: int = 0) -> torch.Tensor:
    return x if block is None else x.narrow(axis, *block)


def _over_blocks(add: Callable[[_Rows | None], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return the sum of what `add` returns for each block of rows."""
    first, *others = _blocks(x)
    total = add(first)
    for block in others:
        total += add(block)
    return total


def _blocks(x: torch.Tensor, axis: int = 0) -> Sequence[_Rows | None]:
    """Return blocks of an axis of which each holds at most some `_BLOCK` elements, one row at least; None is all."""
    rows = max(1, _BLOCK // max(1, math.prod(x.shape[:axis] + x.shape[axis + 1 :])))
    if rows >= x.shape[axis]:
        return [None]
    return [(start, min(rows, x.shape[axis] - start)) for start in range(0, x.shape[axis], rows)]
