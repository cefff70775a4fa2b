"""The norm of each example from factors, from above, as `certificate` proves it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

from gradclip._src.core.formats import FLOAT64, bare_name, format_named
from gradclip._src.core.norms import Norm
from gradclip._src.core.values import Array
from gradclip._src.private.ghost.certificate import ADDED, error_of_square, raised_by_floor, relative_error
from gradclip._src.private.ghost.products import Products
from gradclip._src.private.ghost.records import Dense, Embedding, Gradient, Made, PlacedTerms

# Divisors of norms are powers of two in this range. In units of the largest, a norm above 2**1036 overflows: it counts
# as not finite, as a gradient with elements that large does. In units of the smallest, `ADDED` is below any number.
_LEAST, _MOST = -1000.0, 524.0
# In units of this, the root of `ADDED` stays in the normal range, also where `coefficient` divides by it.
_LEAST_FROM_ABOVE = -440.0


class Scaled(NamedTuple):
    """A gradient in units of 2**exponents, one for each example. None: the units are 1."""

    gradient: Gradient
    exponents: Array | None


class SquaredNorms(NamedTuple):
    """The square of each example's norm for one parameter, about and from above, in units of 4**exponents."""

    square: Array
    above: Array
    exponents: Array | None


def scaled(products: Products, gradient: Gradient) -> Scaled:
    """Return the gradient, with float64 numbers multiplied by powers of two so that squares stay in the range."""
    if all(format_named(bare_name(x.dtype)) is not FLOAT64 for x in arrays_of(gradient)):
        return Scaled(gradient, None)
    xp = products.xp
    if isinstance(gradient, Made):
        exponents = products.exponents(gradient.rows)
        return Scaled(Made(products.times_power(gradient.rows, -exponents)), exponents)
    every = [terms for part in gradient for terms in part.terms]
    lefts = [products.exponents(terms.left) for terms in every if isinstance(terms, Dense)]
    right = _largest(xp, [products.exponents(terms.right) for terms in every])
    # The left side of an embedding is 1.
    ones = [xp.ones_like(right)] if len(lefts) < len(every) else []
    left = _largest(xp, lefts + ones)

    def of_terms(terms: Dense | Embedding) -> Dense | Embedding:
        if isinstance(terms, Embedding):
            return Embedding(terms.indices, products.times_power(terms.right, -(left + right)))
        return Dense(products.times_power(terms.left, -left), products.times_power(terms.right, -right))

    return Scaled([PlacedTerms(part.place, list(map(of_terms, part.terms))) for part in gradient], left + right)


def arrays_of(gradient: Gradient) -> list[Array]:
    """Return the arrays of floating-point numbers in a gradient."""
    if isinstance(gradient, Made):
        return [gradient.rows]
    every = [terms for part in gradient for terms in part.terms]
    return [x for terms in every for x in (terms if isinstance(terms, Dense) else terms[1:])]


def terms_of(gradient: Gradient) -> int:
    """Return the most terms of an example in one matrix."""
    if isinstance(gradient, Made):
        return 1
    return max((sum(terms.right.shape[-2] for terms in part.terms) for part in gradient), default=1)


def measured(products: Products, given: Scaled) -> SquaredNorms:
    """Return the square of the norm of a gradient."""
    if isinstance(given.gradient, Made):
        square = products.made(given.gradient.rows)
        elements = math.prod(given.gradient.rows.shape[1:])
        above = square * (1.0 + _error(elements, 1, 1))
    else:
        matrices = sum(part.place.shape[0] for part in given.gradient)
        found = [_of_part(products, part, matrices) for part in given.gradient]
        square, above = (sum(numbers[1:], numbers[0]) for numbers in zip(*found, strict=True))
    return SquaredNorms(square, above if given.exponents is None else above + ADDED, given.exponents)


def _of_part(products: Products, part: PlacedTerms, matrices: int) -> tuple[Array, Array]:
    """Return q of `certificate`, and N**2, for a parameter of so many blocks in all of its parts."""
    _, rows, columns = part.place.shape
    dense, embedded = parted(products, part)
    found = [] if dense is None else [products.dense(dense)]
    found += [] if embedded is None else [products.embedding(embedded)]
    square, size = found[0]
    if dense is not None and embedded is not None:
        square = square + found[1].square + products.between(dense, embedded) * 2.0
        # M is the sum of both, and (a + b)**2 <= 2 a**2 + 2 b**2.
        size = (size + found[1].size) * 2.0
    terms = terms_of([part])
    return square, square + size * (_error(rows, columns, terms, matrices) + raised_by_floor(terms))


def parted(products: Products, part: PlacedTerms) -> tuple[Dense | None, Embedding | None]:
    """Return the terms of products, and those of embeddings, each as one."""
    dense = [terms for terms in part.terms if isinstance(terms, Dense)]
    rows = [terms for terms in part.terms if isinstance(terms, Embedding)]
    return products.joined(dense) if dense else None, products.joined_rows(rows) if rows else None


def _error(rows: int, columns: int, terms: int, matrices: int = 1) -> float:
    error = error_of_square(rows, columns, terms, matrices)
    assert error is not None  # the plan makes the gradients of larger parameters
    return error


def norm_of(products: Products, found: Sequence[SquaredNorms]) -> tuple[Norm, Norm]:
    """Return the norm over several parameters: from above, and about."""
    xp, error = products.xp, relative_error(len(found))
    given = [one.exponents for one in found if one.exponents is not None]
    if not given:
        above, square = (sum(x[1:], x[0]) for x in ([one.above for one in found], [one.square for one in found]))
        return Norm(xp.sqrt(above), None, error, 0.0), Norm(xp.sqrt(xp.clip(square, 0.0)), None, error, 0.0)
    zeros = xp.zeros_like(given[0])
    exponents = [zeros if one.exponents is None else one.exponents for one in found]
    largest = _largest(xp, exponents)

    def rooted(squares: Sequence[Array], least: float, added: float) -> Norm:
        unit = xp.clip(largest, least, _MOST)
        scaled = (products.times_power(x, 2.0 * (k - unit)) for x, k in zip(squares, exponents, strict=True))
        total = xp.clip(sum(scaled, zeros) + added, 0.0)
        return Norm(xp.sqrt(total), products.times_power(xp.ones_like(unit), unit), error, 0.0)

    upper = rooted([one.above for one in found], _LEAST_FROM_ABOVE, ADDED)
    return upper, rooted([one.square for one in found], _LEAST, 0.0)


def _largest(xp: ModuleType, vectors: Sequence[Array]) -> Array:
    largest = vectors[0]
    for vector in vectors[1:]:
        largest = xp.maximum(largest, vector)
    return largest


def multiplied(by: Products, gradient: Gradient) -> Gradient:
    """Return the gradient with the matrices of each example made, by one product of their factors.

    A matrix is then one term, 1 times all of its numbers.
    """
    if isinstance(gradient, Made):
        return gradient
    parts = []
    for part in gradient:
        terms, _ = parted(by, part)
        assert terms is not None  # the plan keeps embeddings
        matrices: Any = by.multiplied(terms)
        rows = matrices.reshape(matrices.shape[0], 1, 1, -1)
        place = replace(part.place, blocks=(), rows=(), columns=part.place.axes)
        parts.append(PlacedTerms(place, [Dense(by.xp.ones_like(rows[..., :1]), rows)]))
    return parts
