"""Weighted sums of outer products, and norms of such sums from inner products, in float64, for PyTorch tensors.

All take tensors of any real dtypes and strides, and widen them exactly. Nothing is recorded for autograd. The compiled
kernels do it for tensors in host memory, PyTorch's own operations for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gradclip._src import native
from gradclip._src.backends.torch.tensors import PLAIN, described

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
