"""What it costs to measure and sum the gradients of a parameter: as factors, made from them, or made by autograd.

Times are in products of a float32 matrix multiplication, for each example. The constants were measured on processors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from gradclip._src.private.ghost.records import LeafUses, MatrixPlace, Use

_PASSES = 70.0
"""What writing an element of a gradient and reading it for its norm and sum costs."""
_WIDE_SUM, _WIDE_GRAM = 2.7, 2.0
"""A product in float64, in a sum and in a Gram matrix."""
_ROW = 8.0
"""Adding an element of an embedding's row to a sum."""


class Autograd(NamedTuple):
    """What a framework's own per-example gradients cost.

    `addition`: adding a product to a gradient that is there, for each element. `convolution`: how many times a product
    of matrices the product of a convolution takes. `alone`: it is fast only where it makes all gradients. `calls`: what
    the operations of factors take in a call, whatever the numbers.
    """

    addition: float
    convolution: float
    alone: bool = False
    calls: float = 0.0


class Costs(NamedTuple):
    """Times of the three ways; infinite for one that is impossible.

    `kept`: the bytes of an example's factors. `rest`: the time that a step takes anyway, forward and backward.
    """

    ghost: float
    product: float
    autograd: float
    kept: int
    rest: float


def costs_of(leaf: LeafUses, width: int, autograd: Autograd) -> Costs:
    """Return the costs for a parameter with uses. Factors have numbers of `width` bytes."""
    made = _PASSES * math.prod(leaf.shape)
    ghost, product, by_autograd, kept = 0.0, made, made, 0
    for part in parts_of(leaf.uses):
        blocks, rows, columns = part[0].place.shape
        dense = sum(use.terms for use in part if not use.embedding)
        embedded = sum(use.terms for use in part if use.embedding)
        gram = dense**2 * (rows + columns) + embedded * (embedded + 2 * dense) * columns
        ghost += blocks * (_WIDE_GRAM * gram + _WIDE_SUM * dense * rows * columns + _ROW * embedded * columns)
        product += math.inf if embedded else blocks * dense * rows * columns
        by_autograd += sum(_by_autograd(use, autograd) for use in part) - autograd.addition * blocks * rows * columns
        kept += width * blocks * (dense * (rows + columns) + embedded * (columns + 1))
    rest = 2.0 * sum(use.terms * math.prod(use.place.shape) for use in leaf.uses if not use.embedding)
    return Costs(ghost, product, by_autograd, kept, rest)


def without_uses(elements: int) -> Costs:
    """Return the costs of a parameter that cannot come in factors."""
    return Costs(math.inf, math.inf, _PASSES * elements, 0, 0.0)


def _by_autograd(use: Use, autograd: Autograd) -> float:
    """Return what autograd takes for a use: its products, and adding them up."""
    blocks, rows, columns = use.place.shape
    times = autograd.convolution if use.operation.startswith("conv") else 1.0
    products = use.terms * (columns if use.embedding else rows * columns * times)
    return blocks * (products + use.additions * autograd.addition * rows * columns)


def parts_of(uses: Sequence[Use]) -> list[list[Use]]:
    """Return the uses of each place."""
    places: dict[MatrixPlace, list[Use]] = {}
    for use in uses:
        places.setdefault(use.place, []).append(use)
    return list(places.values())
