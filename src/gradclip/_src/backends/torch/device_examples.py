"""Norms of many examples and sums over a batch on an accelerator, with few operations and little memory traffic.

A norm is one reduction: `torch.linalg.vector_norm` in float64. PyTorch guarantees no order of additions, and none is
needed: in any order, a term of a sum of n goes through at most n - 1 additions, which is the bound in `sum_error`. If a
norm must be identical to the last bit whatever else is measured (for integer sums on a grid), the order is that of
`halving_sum`.

A sum over examples is one multiplication in float64 and one sum. An excluded example may contain NaN or infinity, and
multiplying these by 0 gives NaN. So its weight is NaN, which makes all its products NaN, and `torch.nansum` ignores
them. If a non-finite example should spoil the sum, its NaN is added to the sum afterwards.

PyTorch's reductions in float64 read only float64 and first copy narrower numbers. So they process one block at a time.
Long rows are passed as a list to `torch._foreach_norm`, whose CUDA kernel reads any type and accumulates in float64.
Short rows would make the list too long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradclip._src.backends.portable import Portable
from gradclip._src.backends.sums import halving_sum
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import FLOAT64
from gradclip._src.core.layouts import Scope
from gradclip._src.core.rules import Rule

if TYPE_CHECKING:
    from gradclip._src.core.rules import Coefficient

_BLOCK = 1 << 22  # elements: their float64 copy takes 32 MiB; a copy of the whole batch might not fit
_LOWEST = 2.0**-800  # the smallest numerator with quotients in the normal range

_Reader = Callable[[torch.Tensor], torch.Tensor]
_Rows = tuple[int, int]  # the first row and the number of rows
_Axes = Callable[[int], tuple[int, ...]]


class Zeroed(Arrays):
    """Arrays whose non-finite elements count as zeros in norms and sums of examples."""


class _Weighed(NamedTuple):
    """The norms of examples, their weights, and the divisors applied first, if any.

    `telling` is non-finite where an example is. `weights` have as many axes as the tensors if all tensors have the same
    number, otherwise one.
    """

    norms: torch.Tensor
    weights: torch.Tensor
    telling: torch.Tensor
    divisor: torch.Tensor | None = None


class Examples(Portable):
    """Norms of many examples per tensor, and sums over examples."""

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
        """Say whether each tensor has many norms in float64 whose last bits may depend on how many there are."""
        return self.wide is FLOAT64 and not scope.fixed and all(scope.own_axes(x.ndim) for x in arrays)

    def _norms(
        self, arrays: Arrays, p: float, axes: _Axes, divisor: torch.Tensor | None = None, *, keep: bool = False
    ) -> torch.Tensor:
        """Return the norms over all tensors together, one for each position along `axes`, divided first if asked."""
        read, found = _reader(arrays), []
        # `vmap` has no rule for a list of rows, and `torch.compile` would compile each row separately.
        by_row = self.visible and p == 2 and divisor is None and not isinstance(arrays, Zeroed)
        # PyTorch raises an error for the maximum of no elements.
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
        """Return the sum over the axes that share a norm, in an order independent of the number of norms."""
        if not scope.own_axes(wide.ndim):
            return super().sum_shared(wide, scope)
        return halving_sum(self.xp, wide, scope.shared_axes(wide.ndim))

    def zeroed(self, arrays: Arrays) -> Arrays:
        # A complex element is zeroed as a whole, not only its non-finite part.
        if arrays.any_complex or self.wide is not FLOAT64:
            return self.without_nonfinite(arrays)
        # Zeroed block by block while reading: a copy would be as large as the batch.
        return Zeroed(arrays.items, arrays.dtypes)

    def weighted_sums(self, arrays: Arrays, coefficient: Coefficient, *, integers: bool = False) -> list[torch.Tensor]:
        if integers or self.wide is not FLOAT64:
            return super().weighted_sums(arrays, coefficient, integers=integers)
        read, weights, blank = _reader(arrays), coefficient.weights(self.xp), coefficient.blank
        factors = [torch.where(blank, math.nan, weights.first), *([] if weights.second is None else [weights.second])]
        return _spoiled([self._skipping_nan(x, factors, read) for x in arrays], weights.first, ~blank)

    def examples_error(self, arrays: Arrays, count: int) -> float | None:
        flushed = self.wide is not FLOAT64 or any(map(self.flushed_below, arrays.formats))
        return None if flushed else count * FLOAT64.roundoff

    def add_examples(
        self, arrays: Arrays, weighing: Rule, mask: torch.Tensor | None, *, spoil: bool
    ) -> tuple[list[torch.Tensor], torch.Tensor] | None:
        known = isinstance(weighing.numerator, float)
        if self.examples_error(arrays, 1) is None or (known and 0 < weighing.numerator < _LOWEST):
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
        """Weigh examples whose squared norms do not overflow or underflow. A non-finite example gets NaN."""
        norms = self._norms(arrays, 2.0, _first_axis)
        # NaN beside a norm that is not finite, because 0 * inf is NaN.
        weights = torch.add(weighing.weights(torch, norms, in_range=True), norms, alpha=0.0)
        return _Weighed(norms, weights, weights)

    def _scaled(self, arrays: Arrays, weighing: Rule) -> _Weighed:
        """Weigh examples after dividing them so that the largest element is about 1.

        A non-finite example is divided by NaN, or multiplied by 0, which turns infinity into NaN.
        """
        # Weights with the tensors' axes from the start need no reshape for each tensor.
        keep = len({x.ndim for x in arrays}) == 1 and arrays[0].ndim > 1
        # Neither the divisor nor its inverse is subnormal, and squares of the quotients stay in range.
        divisor = torch.clamp(self._norms(arrays, math.inf, _first_axis, keep=keep), 2.0**-1022, 2.0**1022)
        scaled = self._norms(arrays, 2.0, _first_axis, divisor, keep=keep)
        norms = scaled * divisor
        offset, keep_up_to, numerator = (
            x / weighing.inflate for x in (weighing.offset, weighing.keep_up_to, weighing.numerator)
        )
        rule = Rule(1.0, offset, keep_up_to * (1.0 - 2.0**-50), weighing.kept, numerator)
        weights = rule._replace(offset=offset and offset / divisor).quotient(torch, scaled)
        if keep_up_to <= 0:
            weights = torch.clamp(weights, max=2.0**1022)
        else:
            # A norm that overflows may still be below an infinite threshold.
            kept = scaled <= FLOAT64.largest if keep_up_to == math.inf else rule.keeps(norms)
            weights, divisor = weights.masked_fill(kept, weighing.kept), divisor.masked_fill(kept, 1.0)
        return _Weighed(norms.reshape(-1) if keep else norms, weights, scaled, divisor)

    def _skipping_nan(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], read: _Reader, divisor: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum over examples times their weights. An example whose product is NaN adds nothing."""
        factors = [_over(weight.to(x.device), x.ndim) for weight in weights]
        over = None if divisor is None else _over(divisor.to(x.device), x.ndim)

        def add(part: torch.Tensor) -> torch.Tensor:
            # Blocks along the longest axis of an example, so that the blocks' sums need not be added again.
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
        return _over_blocks(super().weighted_sum, x, coefficient)

    def rounded_sum(self, x: torch.Tensor, coefficient: Coefficient) -> torch.Tensor:
        return _over_blocks(super().rounded_sum, x, coefficient)


def _norms_of_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the norms along the first axis. On CUDA this needs no float64 copy."""
    return torch.stack(torch._foreach_norm(x.unbind(), 2, dtype=torch.float64))


def _norms_of(
    x: torch.Tensor, p: float, own: tuple[int, ...], divisor: torch.Tensor | None, read: _Reader, *, keep: bool
) -> torch.Tensor:
    """Return the norms of one real tensor, one for each position along its own axes."""
    shared = [axis for axis in range(x.ndim) if axis not in own]
    found = []
    for block in _blocks(x, own[0]):
        # With one layout for all, an example's norm does not depend on its memory layout.
        some = read(_block(x, block, own[0])).contiguous()
        if divisor is not None:
            shape = [n if axis in own else 1 for axis, n in enumerate(some.shape)]
            by = _block(divisor.to(x.device), block)
            some = some / (by if by.ndim == some.ndim else by.reshape(shape))
        # An empty list of axes would mean all axes.
        some = some if shared else some.unsqueeze(-1)
        found.append(torch.linalg.vector_norm(some, p, shared or -1, keepdim=keep, dtype=torch.float64))
    return found[0] if len(found) == 1 else torch.cat(found)


def _over(values: torch.Tensor, ndim: int) -> torch.Tensor:
    """Reshape one value per example to broadcast to a tensor with `ndim` axes."""
    return values if values.ndim == ndim else values.reshape(-1, *[1] * (ndim - 1))


def _spoiled(sums: Sequence[torch.Tensor], weights: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the sums, or NaN if an example in the mask has the weight NaN."""
    zeros = weights * 0.0
    spoiling = torch.sum(zeros if mask is None else torch.where(mask, zeros, 0.0))
    return [total + spoiling.to(total.device) for total in sums]


def _first_axis(ndim: int) -> tuple[int, ...]:
    return (0,)


def _reader(arrays: Arrays) -> _Reader:
    """Return the function applied to each block that is read."""
    return partial(torch.nan_to_num, nan=0.0, posinf=0.0, neginf=0.0) if isinstance(arrays, Zeroed) else lambda x: x


def _block(x: torch.Tensor, block: _Rows | None, axis: int = 0) -> torch.Tensor:
    return x if block is None else x.narrow(axis, *block)


def _over_blocks(
    add: Callable[[torch.Tensor, Coefficient], torch.Tensor], x: torch.Tensor, coefficient: Coefficient
) -> torch.Tensor:
    """Return the sum of `add(block, coefficient)` over all blocks of rows."""
    first, *others = [partial(_block, block=rows) for rows in _blocks(x)]
    total = add(first(x), coefficient.mapped(first))
    for block in others:
        total += add(block(x), coefficient.mapped(block))
    return total


def _blocks(x: torch.Tensor, axis: int = 0) -> Sequence[_Rows | None]:
    """Return blocks of an axis with at most about `_BLOCK` elements each, and at least one row. None means all."""
    rows = max(1, _BLOCK // max(1, math.prod(x.shape[:axis] + x.shape[axis + 1 :])))
    if rows >= x.shape[axis]:
        return [None]
    return [(start, min(rows, x.shape[axis] - start)) for start in range(0, x.shape[axis], rows)]
