"""Terms of a parameter's gradient: what is kept of a product in the forward pass, and what the backward pass adds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from gradclip._src.private.ghost.records import Dense, Embedding, MatrixPlace, PlacedTerms
from gradclip._src.private.ghost.torch.layout import ViewLayout

Labels = tuple[object, ...]

_PIECE = 2**21
"""The bytes of factors that are cut out and multiplied at a time: they stay in a processor's cache."""


@dataclass(frozen=True, eq=False, slots=True)
class Product:
    """A product, linear in a view of a parameter, as sums over labels: those of the input, the view and the result.

    `inner`: the labels that the input and the view share, in the order of the input's memory; None for the view's.
    """

    given: Labels
    view: Labels
    result: Labels
    inner: Labels | None = None


class Roles(NamedTuple):
    """The axes of the input and of the result in the order blocks, T, and those of the matrix; and how many of each."""

    place: MatrixPlace
    given: tuple[int, ...]
    summed: tuple[int, ...]
    result: tuple[int, ...]
    per_position: int
    swapped: bool

    def positions(self, result: torch.Tensor) -> int:
        """Return the number of positions in the results of all examples."""
        return result.numel() // (max(1, len(result)) * self.per_position)


@lru_cache(maxsize=4096)
def roles_of(product: Product, layout: ViewLayout) -> Roles | None:
    """Return which axes mean what, None if the gradient is not a sum of outer products in a box."""
    given, view, result = product.given, product.view, product.result
    if any(len(set(labels)) < len(labels) for labels in (given, view, result)) or not set(view) <= {*given, *result}:
        return None
    if not set(result) <= {*given, *view}:
        return None
    blocks = [x for x in view if x in given and x in result]
    inner = product.inner or [x for x in view if x not in result]
    outer = [x for x in view if x not in given]
    positions = [x for x in result if x not in view]
    found = layout.place(*(tuple(view.index(x) for x in role) for role in (blocks, inner, outer)))
    if found is None:
        return None
    place, inner_first = found
    kept = [x for x in given if x in view or x in result]
    summed = tuple(i + 1 for i, x in enumerate(given) if x not in kept)
    order = [*blocks, *positions, *inner], [*blocks, *positions, *outer]
    return Roles(
        place,
        (0, *(1 + kept.index(x) for x in order[0])),
        summed,
        (0, *(1 + result.index(x) for x in order[1])),
        place.shape[0] * place.shape[2 if inner_first else 1],
        not inner_first,
    )


def dense(roles: Roles, given: torch.Tensor, cotangent: torch.Tensor, positions: int) -> Dense:
    """Return the factors of shape (batch, blocks, T, rows) and (batch, blocks, T, columns)."""
    if roles.summed:
        given = given.sum(roles.summed)
    inner, outer = _ordered(given, roles.given), _ordered(cotangent, roles.result)
    return paired(roles, inner, outer, len(given), positions)


def paired(roles: Roles, inner: torch.Tensor, outer: torch.Tensor, count: int, positions: int) -> Dense:
    """Return inputs and cotangents, ordered by example, block and position, as factors."""
    blocks, rows, columns = roles.place.shape
    left, right = (outer, inner) if roles.swapped else (inner, outer)
    return Dense(left.reshape(count, blocks, positions, rows), right.reshape(count, blocks, positions, columns))


def _ordered(x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    return x if axes == tuple(range(len(axes))) else x.permute(axes)


@dataclass(slots=True)
class Term:
    """A use of a parameter in the forward pass. `edge` is where the cotangent of its result appears.

    `finish` turns the cotangents into factors, or into the gradient of each example if `place` is None. `kept` is the
    input, and `version` counts the writes to it, because a changed input gives a wrong gradient. `of_some` returns the
    factors of some examples, given their cotangents and numbers, if factors take much more memory than the input.
    """

    place: MatrixPlace | None
    positions: int
    operation: str
    edge: Any
    finish: Callable[[torch.Tensor], Any]
    kept: torch.Tensor | None = None
    version: int = 0
    embedding: bool = False
    of_some: Callable[[torch.Tensor, slice], Dense] | None = None

    def check(self) -> None:
        """Raise a RuntimeError if the input has been written to since."""
        if self.kept is not None and self.kept._version != self.version:
            raise RuntimeError(
                f"the input of {self.operation} has been modified by an in-place operation, and the gradient needs it. "
                "Replace the in-place operation by one that returns a new tensor."
            )


def parts_of(terms: Sequence[tuple[MatrixPlace, Dense | Embedding]]) -> tuple[list[PlacedTerms], str]:
    """Return the terms by place, and an empty text; or say why they have no disjoint places."""
    by_place: dict[MatrixPlace, list[Dense | Embedding]] = {}
    for place, term in terms:
        by_place.setdefault(place, []).append(term)
    return [PlacedTerms(place, found) for place, found in by_place.items()], overlap(list(by_place))


def nothing_of(batch: torch.Tensor) -> PlacedTerms:
    """Return the part without terms, which stands for a gradient of zeros. `batch` has its shape (batch, ...)."""
    count, *shape = batch.shape
    numel = math.prod(shape)
    place = MatrixPlace((0,) * len(shape), tuple(shape), (numel,), (), (0,), ())
    return PlacedTerms(place, [Dense(batch.new_zeros(count, 1, 0, numel), batch.new_zeros(count, 1, 0, 1))])


def overlap(places: Sequence[MatrixPlace]) -> str:
    """Return an empty text if the places are disjoint, else say what overlaps."""
    for i, one in enumerate(places):
        for other in places[:i]:
            if all(a < d and c < b for a, b, c, d in zip(one.start, one.stop, other.start, other.stop, strict=True)):
                return "uses of parts that overlap, or of the same part as different matrices"
    return ""


def multiplied(term: Term, cotangent: torch.Tensor) -> torch.Tensor | None:
    """Return the matrices of each example in the shape of their box, made piece by piece, in at least float32.

    None if the term does not come in pieces.
    """
    place, of_some = term.place, term.of_some
    if place is None or of_some is None:
        return None
    blocks, rows, columns = place.shape
    of_one = blocks * term.positions * (rows + columns) * cotangent.element_size()
    size = max(1, _PIECE // max(1, of_one))
    wide = torch.promote_types(cotangent.dtype, torch.float32)
    made = cotangent.new_empty((len(cotangent), blocks, rows, columns), dtype=wide)
    for start in range(0, len(cotangent), size):
        piece = slice(start, start + size)
        left, right = (x.to(wide).flatten(0, 1) for x in of_some(cotangent[piece], piece))
        torch.bmm(left.mT, right, out=made[piece].flatten(0, 1))
    return _in_box(made, place)


def _in_box(matrices: torch.Tensor, place: MatrixPlace) -> torch.Tensor:
    """Return matrices of shape (batch, blocks, rows, columns) in the shape of their box."""
    order = [0] * len(place.axes)
    for i, axis in enumerate(place.axes):
        order[axis] = i + 1
    sizes = [place.view[axis] for axis in place.axes]
    return matrices.reshape(-1, *sizes).permute(0, *order).reshape(-1, *place.box)


def materialized(parts: Sequence[PlacedTerms], like: torch.Tensor) -> torch.Tensor:
    """Return the gradient of each example, the sum of all parts. `like` is zeros of its shape (batch, ...)."""
    total = like
    for part in parts:
        place = part.place
        box = total[(slice(None), *(slice(a, b) for a, b in zip(place.start, place.stop, strict=True)))]
        for term in part.terms:
            box += _in_box(_matrices(term, place, like.dtype), place)
    return total


def _matrices(term: Any, place: MatrixPlace, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrices of each example: shape (batch, blocks, rows, columns)."""
    if isinstance(term, Dense):
        return term.left.to(dtype).mT @ term.right.to(dtype)
    _, rows, columns = place.shape
    made = term.right.new_zeros((len(term.right), rows, columns), dtype=dtype)
    index = term.indices[..., None].expand(*term.indices.shape, columns)
    return made.scatter_add_(1, index, term.right.to(dtype))[:, None]
