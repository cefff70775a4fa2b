"""How a function of one example uses its parameters, and the gradients of a batch in factors.

The gradient of an example for a parameter that enters products is a sum of outer products: G = sum over t of
left_t right_t^T, one term for each use, position or time step. One of the factors is an input of the product, the other
the cotangent of its result. The same holds for each block of a batched product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class MatrixPlace:
    """Where the matrices of a part lie in a parameter.

    The part is the box from `start` to `stop` along each axis of the parameter. Reshaped to `view`, its axes `blocks`,
    `rows` and `columns` index the blocks, and the rows and columns of each matrix. Together they are all axes.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    view: tuple[int, ...]
    blocks: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of blocks, rows and columns."""
        blocks, rows, columns = (
            math.prod(self.view[i] for i in axes) for axes in (self.blocks, self.rows, self.columns)
        )
        return blocks, rows, columns

    @property
    def box(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of the view in the order blocks, rows, columns."""
        return (*self.blocks, *self.rows, *self.columns)


class Dense(NamedTuple):
    """Terms of products: `left` of shape (batch, blocks, T, rows) and `right` of shape (batch, blocks, T, columns)."""

    left: Any
    right: Any


class Embedding(NamedTuple):
    """Terms of an embedding: row `indices`[t] gets `right`_t. Shapes (batch, T) and (batch, T, columns)."""

    indices: Any
    right: Any


@dataclass(frozen=True)
class PlacedTerms:
    """The terms of one part of a parameter, all of one place; `Embedding` only where there is one block."""

    place: MatrixPlace
    terms: Sequence[Dense | Embedding]


class Made(NamedTuple):
    """The gradient of each example: shape (batch, ...)."""

    rows: Any


Gradient = Made | Sequence[PlacedTerms]
"""The gradients of a batch for one parameter. One or more parts cover disjoint elements; the others are zero."""


class Tapped(NamedTuple):
    """What a run over a batch gives: the gradients of each parameter, and the outputs of each example.

    `untapped`: the parameters that were to come in parts and could not, with the reason.
    """

    gradients: Sequence[Gradient]
    values: Any
    aux: Any
    untapped: dict[int, str]


@dataclass(frozen=True)
class Use:
    """One use of a part of a parameter in a function of one example: `terms` outer products, or rows of an embedding.

    `operation` names it for the user, such as "dot_general", "conv_general_dilated" or "embedding". `additions`: how
    often the framework would add to a gradient that is made, once in each iteration of a loop.
    """

    place: MatrixPlace
    terms: int
    embedding: bool
    operation: str
    additions: int = 1


@dataclass(frozen=True)
class LeafUses:
    """How a function of one example uses one parameter.

    `uses` is empty if the parameter is unused, or if `reason` says which operation cannot be tapped. `only_tapped`: the
    framework itself cannot make its gradients for a whole batch. `added`: it is only added to values of the example, as
    a bias or a table of positions. So its gradients are about as large as those values, or smaller.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    uses: tuple[Use, ...] = ()
    reason: str = ""
    only_tapped: bool = False
    added: bool = False
