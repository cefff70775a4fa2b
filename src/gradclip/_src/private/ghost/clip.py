"""Clip each example of a batch by its own norm and add up, from gradients in factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
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
from gradclip._src.private.batching.prepared import Outline
from gradclip._src.private.ghost.certificate import LARGEST_WEIGHT, SMALLEST_WEIGHT
from gradclip._src.private.ghost.measure import Scaled, arrays_of, measured, norm_of, parted, scaled
from gradclip._src.private.ghost.products import Products
from gradclip._src.private.ghost.records import Gradient, Made, PlacedTerms
from gradclip._src.private.sums.clip import Grouping
from gradclip._src.private.sums.settings import PerExampleSettings
from gradclip._src.private.sums.summed import nothing, shared_threshold
from gradclip._src.tree import FlatTree


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
