"""Matrix products for norms and sums of factors, in PyTorch."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from array_api_compat import torch as namespace

from gradclip._src.backends.torch.products import gram_squares, outer_sums, row_squares
from gradclip._src.private.ghost.products import Products, Squares
from gradclip._src.private.ghost.records import Dense, Embedding


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
