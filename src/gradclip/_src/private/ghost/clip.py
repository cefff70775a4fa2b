"""Clip each example of a batch by its own norm and add up, from gradients in factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

from gradclip._src.backends.registry import find
from gradclip._src.core.coefficient import coefficient
from gradclip._src.core.formats import FLOAT64, bare_name, format_named
from gradclip._src.core.nonfinite import TO_GO_ON, Nonfinite
from gradclip._src.core.norms import Norm, settled
from gradclip._src.core.protocols import Backend
from gradclip._src.core.rules import Target
from gradclip._src.core.values import Array
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.private.batching.calls import Outline
from gradclip._src.private.ghost.certificate import (
    ADDED,
    LARGEST_WEIGHT,
    SMALLEST_WEIGHT,
    error_of_square,
    raised_by_floor,
    relative_error,
)
from gradclip._src.private.ghost.records import Dense, Embedding, Gradient, Made, PlacedTerms
from gradclip._src.private.ghost.taps import Products
from gradclip._src.private.sums.clip import Grouping
from gradclip._src.private.sums.settings import PerExampleSettings
from gradclip._src.private.sums.summed import nothing, shared_threshold
from gradclip._src.tree import FlatTree

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
        found = [_norms_of_part(products, part, matrices) for part in given.gradient]
        square, above = (sum(numbers[1:], numbers[0]) for numbers in zip(*found, strict=True))
    return SquaredNorms(square, above if given.exponents is None else above + ADDED, given.exponents)


def _norms_of_part(products: Products, part: PlacedTerms, matrices: int) -> tuple[Array, Array]:
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


class ExampleClipping(NamedTuple):
    """How examples are clipped: to a checked threshold, by a rule, under a policy."""

    threshold: Any
    target: Target
    nonfinite: Nonfinite


class Weights(NamedTuple):
    """What the gradient of each example is multiplied by, one factor after the other, as the products' arrays."""

    first: Array
    second: Array | None


def clipped_sums(
    products: Products,
    backend: Backend,
    gradients: Sequence[Gradient],
    kinds: Sequence[tuple[tuple[int, ...], str]],
    clipping: ExampleClipping,
    mask: Array | None,
) -> tuple[list[Array], Norm]:
    """Return the sum over examples for each parameter, and the norm of each example.

    `kinds`: the shape of each parameter, and the dtype to which its sum is rounded from float64.

    Outside `mask`, booleans of the backend, examples add nothing, and their norms are 0. Raises FloatingPointError
    under the policy "raise".
    """
    units = [scaled(products, gradient) for gradient in gradients]
    above, about = (_of_backend(products, x) for x in norm_of(products, [measured(products, unit) for unit in units]))
    if clipping.nonfinite.raises:
        clipping.nonfinite.check_visible(backend)
        _check_finite(backend, about, mask)
    weights = _weights(products, backend, above, clipping, mask)
    sums: list[Array] = []
    spoils = clipping.nonfinite.spoils
    for unit, (shape, dtype) in zip(units, kinds, strict=True):
        # Each sum waits for the one before, so that only one is in memory in float64.
        own = weights if not sums else weights._replace(first=products.after(weights.first, sums[-1]))
        sums.append(products.rounded(_sum(products, unit, shape, own, spoils=spoils), dtype))
    return sums, about if mask is None else replace(about, value=backend.xp.where(mask, about.value, 0.0))


def _of_backend(products: Products, norm: Norm) -> Norm:
    """Return the norm of each example as arrays of the backend."""
    divisor = None if norm.divisor is None else products.given(norm.divisor)
    return replace(norm, value=products.given(norm.value), divisor=divisor)


def _check_finite(backend: Backend, norm: Norm, mask: Array | None) -> None:
    finite = backend.xp.isfinite(norm.value)
    wrong = ~finite if mask is None else ~finite & mask
    if backend.xp.any(wrong):
        raise FloatingPointError(
            f"the gradients of {int(backend.xp.sum(wrong))} of {finite.shape[0]} examples are not finite. Nothing has "
            f"been changed. {TO_GO_ON}"
        )


def _weights(
    products: Products, backend: Backend, norm: Norm, clipping: ExampleClipping, mask: Array | None
) -> Weights:
    """Return the weights: 0 outside the mask, and 0 or NaN, by the policy, where the norm is not finite."""
    xp = backend.xp
    threshold = backend.scalar(clipping.threshold, ())
    chosen = coefficient(backend, settled(backend, norm), threshold, clipping.target, split=norm.divisor is not None)
    factors = chosen.weights(xp)
    first = xp.where(xp.isfinite(norm.value), factors.first, math.nan if clipping.nonfinite.spoils else 0.0)
    first = first if mask is None else xp.where(mask, first, 0.0)
    return Weights(products.taken(first), None if factors.second is None else products.taken(factors.second))


def _in_units(products: Products, weights: Weights, exponents: Array | None) -> Array:
    """Return the weights of a gradient in units of 2**exponents. One that is too small is 0, one too large is less."""
    xp = products.xp
    if exponents is None:
        product = weights.first if weights.second is None else weights.first * weights.second
        # A product with numbers of float32 must stay in the normal range.
        return xp.where(product < SMALLEST_WEIGHT, 0.0, xp.where(product > LARGEST_WEIGHT, LARGEST_WEIGHT, product))
    product = products.times_power(weights.first, exponents)
    product = product if weights.second is None else product * weights.second
    # A subnormal product may have been rounded up.
    return xp.where((product < FLOAT64.tiny) | xp.isinf(product), 0.0, product)


def _sum(products: Products, given: Scaled, shape: tuple[int, ...], weights: Weights, *, spoils: bool) -> Array:
    """Return the sum over examples of one parameter's gradients, each times its weight."""
    own = _in_units(products, weights, given.exponents)
    if isinstance(given.gradient, Made):
        return products.sum_made(given.gradient.rows, own)
    total = None
    for part in given.gradient:
        found = products.put(_of_part(products, part, own), part.place.start, shape)
        total = found if total is None else total + found
    if total is None:
        empty = (0,) * len(shape)
        total = products.put(own[:0].reshape(empty), empty, shape)
    # The sum of the weights is NaN if one is. It then spoils elements that no term reaches.
    return total + products.xp.sum(own * 0.0) if spoils else total


def _of_part(products: Products, part: PlacedTerms, weights: Array) -> Array:
    """Return the sum over examples of one part, in the shape of its box."""
    place = part.place
    dense, rows = parted(products, part)
    total = None if dense is None else products.sum_dense(dense, weights)
    if rows is not None:
        embedded = products.sum_rows(rows, weights, place.shape[1])
        total = embedded if total is None else total + embedded
    assert total is not None
    return products.placed(total, place.view, place.axes, place.box)


@with_subnormals
def clip_factors(
    products: type[Products],
    parameters: FlatTree,
    gradients: Sequence[Gradient],
    settings: PerExampleSettings,
    mask: object,
) -> tuple[Any, Any]:
    """Clip and add up as `gradclip.per_example_clip`. Return the sums, and the norms of the examples."""
    grouping = Grouping.of(parameters.outline([Outline((1, *x.shape), x.dtype) for x in parameters.leaves]), settings)
    arrays = [x for gradient in gradients for x in arrays_of(gradient)]
    backend = find(arrays, lambda: ["a factor of a gradient"] * len(arrays), *grouping.thresholds, mask)
    backend.check_sum_dtype(settings.dtype_of_sums)
    inside = None if mask is None else backend.booleans(mask)
    sums: dict[int, Any] = {}
    norms = []
    by = products(concrete=backend.concrete)
    with backend.precision(), by.precision():
        for indices, threshold, share in zip(grouping.groups, grouping.thresholds, grouping.shares, strict=True):
            if not indices:
                norms.append(nothing(backend, arrays[0].shape[:1], arrays).norm)
                continue
            limit = shared_threshold(backend, check_threshold(threshold, backend=backend), share)
            leaves = [parameters.leaves[i] for i in indices]
            clipping = ExampleClipping(limit, settings.target, settings.policy)
            own = [gradients[i] for i in indices]
            kinds = [(tuple(x.shape), settings.dtype_of_sums or precise(x.dtype)) for x in leaves]
            totals, norm = clipped_sums(by, backend, own, kinds, clipping, inside)
            sums.update(zip(indices, totals, strict=True))
            wide = "float64" in [precise(x.dtype) for x in leaves]
            norms.append(backend.leave_scalar(norm.product(), "float64" if wide else "float32", arrays[:1]))
    total = parameters.rebuild([sums[i] for i in range(len(sums))])
    return total, norms[0] if grouping.shape is None else grouping.shape.arrange(norms)


def precise(dtype: Any) -> str:
    """Return the dtype of a sum or norm of numbers of a dtype: "float64" or "float32"."""
    return "float64" if format_named(bare_name(dtype)) is FLOAT64 else "float32"
