"""Where the outer products of a use lie in a parameter, and its arrays in canonical order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from jax import Array, lax

from gradclip._src.per_example.ghost.jax_views import Factor, Factors, NotFollowedError, Piece
from gradclip._src.per_example.ghost.records import MatrixPlace

Labels = Sequence[Factors]  # for each axis of an array, the factors that it is a product of


def flat(labels: Labels) -> list[Factor]:
    """Return all factors in order, without those of length 1."""
    return [factor for factors in labels for factor in factors if factor.size != 1]


def place(piece: Piece, blocks: Sequence[Factor], rows: Sequence[Factor], columns: Sequence[Factor]) -> MatrixPlace:
    """Return the place of a piece whose factors are these. Raises NotFollowedError if the piece is not a box."""
    kind = {factor: name for name, group in zip("brc", (blocks, rows, columns), strict=True) for factor in group}
    factors = sorted(kind, key=_in_order)
    stop = []
    for axis, start in enumerate(piece.start):
        size = 1
        for factor in [one for one in factors if one.axis == axis][::-1]:
            if factor.stride != size:
                raise NotFollowedError
            size *= factor.size
        stop.append(start + size)
    groups = [(name, math.prod(one.size for one in group)) for name, group in groupby(factors, key=kind.__getitem__)]
    found = {name: tuple(i for i, (other, _) in enumerate(groups) if other == name) for name in "brc"}
    return MatrixPlace(piece.start, tuple(stop), tuple(size for _, size in groups), found["b"], found["r"], found["c"])


def first_of(rows: Sequence[Factor], columns: Sequence[Factor]) -> bool:
    """Say whether the outermost of these factors in the parameter is among `rows`."""
    outermost = min([*rows, *columns], key=_in_order, default=None)
    return outermost is None or outermost in rows


def ordered(factors: Sequence[Factor]) -> list[Factor]:
    """Return factors in their order in the parameter."""
    return sorted(factors, key=_in_order)


def arranged(array: Array, labels: Labels, *groups: Sequence[Factor]) -> Array:
    """Return the array with one axis for each group of factors."""
    factors = flat(labels)
    split = lax.reshape(array, [factor.size for factor in factors])
    turned = lax.transpose(split, [factors.index(factor) for group in groups for factor in group])
    return lax.reshape(turned, [math.prod(factor.size for factor in group) for group in groups])


def _in_order(factor: Factor) -> tuple[int, int]:
    return factor.axis, -factor.stride
