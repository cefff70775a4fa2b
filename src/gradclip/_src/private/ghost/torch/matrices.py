"""Matrix products for norms and sums of factors, in PyTorch.

All take tensors of any real dtypes and strides, and widen them exactly. Nothing is recorded for autograd. The compiled
kernels do it for tensors in host memory, PyTorch's own operations for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from array_api_compat import torch as namespace

from gradclip._src import native
from gradclip._src.backends.torch.tensors import PLAIN, described
from gradclip._src.private.ghost.records import Dense, Embedding
from gradclip._src.private.ghost.taps import Products, Squares

if TYPE_CHECKING:
    from gradclip._src.native._kernels import Arrays as KernelArrays


_WIDE = torch.float64


@torch.no_grad()
def outer_sums(left: torch.Tensor | None, right: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return sum_k weight_k left[g, k]^T right[g, k], float64 (blocks, rows, columns).

    `left` is (blocks, K, rows), or None for ones with one row; `right` is (blocks, K, columns). `weights` (examples,)
    are float64, each for K / examples of the k. A k with weight 0 adds nothing, whatever it holds. A term goes through
    at most K + 2 roundings.
    """
    blocks, depth, columns = right.shape
    rows = 1 if left is None else left.shape[2]
    if (left is not None and left.shape[:2] != (blocks, depth)) or (
        depth and (not len(weights) or depth % len(weights))
    ):
        raise ValueError(
            f"left must be (blocks, K, rows), right (blocks, K, columns), with K a multiple of the number of weights; "
            f"got {None if left is None else tuple(left.shape)}, {tuple(right.shape)} and {weights.shape[0]} weights"
        )
    if not blocks * depth * rows * columns:
        return torch.zeros((blocks, rows, columns), dtype=_WIDE, device=right.device)
    sides = [right] if left is None else [left, right]
    inputs = _prepared([*sides, weights.to(_WIDE)])
    totals = torch.empty((blocks, rows, columns), dtype=_WIDE, device=right.device)
    known = _known([*inputs, totals])
    if known is None:
        return _outer_sums(inputs, depth)
    *others, of_right, of_weights, of_totals = known
    of_left = others[0] if others else None
    threads = torch.get_num_threads()
    native.kernels.outer_sums(of_left, of_right, of_weights, of_totals, blocks, rows, columns, threads)
    return totals


@torch.no_grad()
def gram_squares(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return |sum_t left[n, t]^T right[n, t]|^2 and sum_t |left[n, t]| |right[n, t]| for each n, in float64.

    `left` is (N, T, rows), `right` (N, T, columns). Both results are NaN where an element is not finite. With v =
    2**-53, k = rows + columns + T^2 + 10 and g = k v / (1 - k v), the first is off by at most g times the square of the
    exact second, and the second by at most g times itself (`native/gram.hpp`; PyTorch's sums add in any order).
    """
    if left.shape[:2] != right.shape[:2]:
        raise ValueError(
            f"left must be (N, T, rows) and right (N, T, columns), got {tuple(left.shape)} and {tuple(right.shape)}"
        )
    count, terms, rows = left.shape
    squares, sizes = (torch.zeros(count, dtype=_WIDE, device=left.device) for _ in range(2))
    if not left.numel() or not right.numel():
        return squares, sizes
    inputs = _prepared([left, right])
    known = _known([*inputs, squares, sizes])
    if known is None:
        return _gram_squares(*inputs)
    x, y, of_squares, of_sizes = known
    native.kernels.gram_squares(x, y, count, terms, rows, right.shape[2], of_squares, of_sizes, torch.get_num_threads())
    return squares, sizes


@torch.no_grad()
def row_squares(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares over the last axis in float64; NaN or infinite where an element is not finite."""
    inputs = _prepared([x])
    sums = torch.zeros(x.shape[:-1], dtype=_WIDE, device=x.device)
    known = _known([*inputs, sums]) if x.numel() else None
    if known is None:
        return inputs[0].to(_WIDE).square().sum(-1)
    known[0].sum_rows([sums.numel()], 2.0, known[1], torch.get_num_threads())
    return sums


def _prepared(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.detach().resolve_neg().contiguous() for x in tensors]


def _known(tensors: Sequence[torch.Tensor]) -> list[KernelArrays] | None:
    """Describe each tensor to the kernels; None if they cannot take one, or are not fast on this processor."""
    if native.kernels is None or not native.kernels.fuses() or not set(map(type, tensors)) <= PLAIN:
        return None
    found = [described([x]) for x in tensors]
    return None if any(one.left_out for one in found) else [one.kernels for one in found]


def _outer_sums(inputs: Sequence[torch.Tensor], depth: int) -> torch.Tensor:
    *sides, weights = inputs
    of_rows = weights.repeat_interleave(depth // len(weights))[None, :, None]
    # Zero times what a row of weight 0 holds may be NaN.
    *left, right = (x.to(_WIDE).masked_fill(of_rows == 0, 0.0) for x in sides)
    weighted = left[0] * of_rows if left else of_rows.expand(len(right), -1, 1)
    return weighted.mT @ right


def _gram_squares(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = left.to(_WIDE), right.to(_WIDE)
    squares = ((x @ x.mT) * (y @ y.mT)).sum((1, 2))
    sizes = (x.square().sum(-1).sqrt() * y.square().sum(-1).sqrt()).sum(-1)
    finite = squares.isfinite() & sizes.isfinite()
    return squares.where(finite, torch.nan), sizes.where(finite, torch.nan)


class TorchProducts(Products):
    """`Products` for PyTorch."""

    xp = namespace

    def __init__(self, *, concrete: bool) -> None:
        self.concrete = concrete

    def precision(self) -> AbstractContextManager[Any]:
        return torch.no_grad()

    def dense(self, terms: Dense) -> Squares:
        batch, blocks = terms.left.shape[:2]
        squares, sizes = gram_squares(*(x.reshape(batch * blocks, *x.shape[2:]) for x in terms))
        return Squares(squares.reshape(batch, blocks).sum(1), (sizes * sizes).reshape(batch, blocks).sum(1))

    def embedding(self, terms: Embedding) -> Squares:
        right = terms.right.double()
        gram = right @ right.mT
        same = terms.indices[:, :, None] == terms.indices[:, None, :]
        sizes = row_squares(terms.right).sqrt().sum(1)
        return Squares(torch.where(same, gram, 0.0).sum((1, 2)), sizes * sizes)

    def between(self, dense: Dense, rows: Embedding) -> torch.Tensor:
        gram = rows.right.double() @ dense.right[:, 0].double().mT
        length = dense.left.shape[2]
        indices = rows.indices[:, None, :].expand(-1, length, -1)
        entries = dense.left[:, 0].gather(2, indices)  # (batch, s, t)
        return (gram * entries.double().mT).sum((1, 2))

    def made(self, rows: torch.Tensor) -> torch.Tensor:
        return row_squares(rows.permute(_in_memory(rows)).reshape(len(rows), -1))

    def multiplied(self, terms: Dense) -> torch.Tensor:
        wide = torch.promote_types(torch.promote_types(terms.left.dtype, terms.right.dtype), torch.float32)
        return terms.left.to(wide).mT @ terms.right.to(wide)

    def joined(self, terms: Sequence[Dense]) -> Dense:
        return terms[0] if len(terms) == 1 else Dense(*(torch.cat(x, 2) for x in zip(*terms, strict=True)))

    def joined_rows(self, terms: Sequence[Embedding]) -> Embedding:
        return terms[0] if len(terms) == 1 else Embedding(*(torch.cat(x, 1) for x in zip(*terms, strict=True)))

    def exponents(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.double().abs().reshape(len(x), -1).amax(1) if x[0].numel() else x.new_zeros(len(x)).double()
        return torch.where(largest.isfinite(), torch.frexp(largest)[1], 0).double()

    def times_power(self, x: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        product = x.double()
        third = torch.trunc(exponents / 3)
        # Each factor is a normal number, whatever the exponent.
        for part in (third, third, exponents - 2 * third):
            product = product * torch.ldexp(torch.ones_like(part), part.int()).reshape(-1, *[1] * (x.ndim - 1))
        return product

    def sum_dense(self, terms: Dense, weights: torch.Tensor) -> torch.Tensor:
        left, right = (x.transpose(0, 1).reshape(x.shape[1], -1, x.shape[3]) for x in terms)
        return outer_sums(left, right, weights)

    def sum_rows(self, terms: Embedding, weights: torch.Tensor, rows: int) -> torch.Tensor:
        by = weights.reshape(-1, 1, 1)
        weighed = torch.where(by == 0, 0.0, terms.right.double() * by)
        columns = weighed.shape[-1]
        total = weighed.new_zeros((rows, columns))
        return total.index_add_(0, terms.indices.reshape(-1), weighed.reshape(-1, columns))[None]

    def sum_made(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = _in_memory(rows)
        stored = rows.permute(order)
        total = outer_sums(None, stored.reshape(1, len(rows), -1), weights).reshape(stored.shape[1:])
        return total.permute([order.index(axis) - 1 for axis in range(1, rows.dim())])

    def placed(
        self, part: torch.Tensor, view: tuple[int, ...], order: tuple[int, ...], box: tuple[int, ...]
    ) -> torch.Tensor:
        return part.reshape([view[axis] for axis in order]).permute(np.argsort(order).tolist()).reshape(box)

    def put(self, part: torch.Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        if tuple(part.shape) == shape:
            return part
        whole = part.new_zeros(shape)
        whole[tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))] = part
        return whole

    def rounded(self, total: torch.Tensor, dtype: str) -> torch.Tensor:
        return total.to(getattr(torch, dtype))

    def after(self, vector: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return vector

    def given(self, vector: torch.Tensor) -> Any:
        return vector.numpy() if self.concrete else vector

    def taken(self, vector: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(vector)) if self.concrete else vector


def _in_memory(x: torch.Tensor) -> list[int]:
    """Return the axes of an array in the order of its memory, with the batch first. Autograd transposes gradients."""
    return [0, *sorted(range(1, x.dim()), key=lambda axis: -x.stride(axis))]
