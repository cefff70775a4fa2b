"""Rows of parameters, picked by indices: `embedding`, `table[indices]` and `index_select`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from gradclip._src.private.ghost.records import Embedding
from gradclip._src.private.ghost.torch.parameter import (
    UNKNOWN,
    Arguments,
    Keywords,
    Operation,
    handles,
    on_copies,
    tapped,
)
from gradclip._src.private.ghost.torch.run import Tap, unviewed


@handles(F.embedding)
def embedding(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Keep the indices. The row `padding_idx` gets no gradient."""
    indices, table, padding, max_norm, _, by_frequency, _ = _embedding_arguments(*args, **kwargs)
    if tapped(indices) or not tapped(table):
        return UNKNOWN
    refused = "max_norm" if max_norm is not None else "scale_grad_by_freq" if by_frequency else ""
    if refused:
        table.tap.leaf.untap(f"embedding with {refused}")
        return on_copies(func, args, kwargs)
    if padding is not None and padding < 0:
        padding += table.tap.weight.shape[0]
    return _picked(table.tap, indices, "embedding", padding)


def _embedding_arguments(
    input: object,
    weight: object,
    padding_idx: object = None,
    max_norm: object = None,
    norm_type: object = 2.0,
    scale_grad_by_freq: object = False,
    sparse: object = False,
) -> tuple[Any, ...]:
    return input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse


def rows_at(tap: Tap, index: object) -> Any:
    """Keep `table[index]` for a tensor of integers."""
    integers = (torch.int64, torch.int32, torch.int16, torch.int8)
    if not isinstance(index, torch.Tensor) or tapped(index) or index.dtype not in integers:
        return UNKNOWN
    return _picked(tap, index, "indexing", None)


@handles(torch.index_select, torch.Tensor.index_select)
def index_select(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Keep the indices of rows."""
    if len(args) != 3 or kwargs or not tapped(args[0]) or args[1] != 0 or tapped(args[2]):
        return UNKNOWN
    return rows_at(args[0].tap, args[2])


def _picked(tap: Tap, indices: torch.Tensor, name: str, padding: int | None) -> Any:
    if not (tap.leaf.tapped and tap.inside) or tap.weight.dim() == 0:
        return UNKNOWN
    found = tap.layout.place((), (0,), tuple(range(1, tap.weight.dim())))
    if found is None or not found[1]:
        tap.leaf.untap(f"{name} of columns or of a view that is not a box of the parameter")
        return UNKNOWN
    run, place = tap.run, found[0]
    batch = run.batch(indices)
    made = unviewed(tap.weight[batch])
    positions, columns = math.prod(batch.shape[1:]), place.shape[2]

    def finish(e: torch.Tensor) -> Embedding:
        rows = batch.reshape(run.count, positions).long()
        right = e.reshape(run.count, positions, columns)
        if padding is not None:
            right = right.where((rows != padding)[..., None], 0)
        return Embedding(rows.where(rows >= 0, rows + place.shape[1]), right)

    tap.keep_term(place, positions, name, made, batch, finish, embedding=True)
    return run.one(made)
