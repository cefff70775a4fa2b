"""From arrays and a threshold to a norm and a coefficient: the one path for all ways of clipping."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradclip.core import nearest
from gradclip.core.arrays import Arrays
from gradclip.core.coefficient import coefficient, exceeds, needs_split, undecided
from gradclip.core.nonfinite import PROPAGATE, Nonfinite
from gradclip.core.norms import Norm, Order, measure, settled
from gradclip.core.protocols import Backend
from gradclip.core.records import Coefficient, Multiplier
from gradclip.core.rules import CLIP, Target
from gradclip.core.scopes import LAYER, TREE, Scope
from gradclip.core.values import Array

if TYPE_CHECKING:
    from gradclip.core.holders import Holders


@dataclass(frozen=True)
class Clipping:
    """One request: a checked threshold, an order, a policy for NaN and infinity, and a target."""

    max_norm: Any
    order: Order
    nonfinite: Nonfinite
    target: Target


@dataclass(frozen=True)
class Decision:
    """The measured norm, the coefficient that follows, and the arrays to scale."""

    norm: Norm
    coefficient: Any  # a `Coefficient`; if all elements share a norm, possibly a `Multiplier`
    arrays: Arrays


class Seen(NamedTuple):
    """What a norm shows: whether it is finite, above the threshold, and above so many times the threshold."""

    finite: Any
    above: Any
    spike: Any


def seen(backend: Backend, norm: Norm, max_norm: float | Array, spikes_above: float) -> Seen:
    """Return what a measured norm shows. Unlike the scalar that users get, it holds any finite norm."""
    in_range, threshold = settled(backend, norm), backend.scalar(max_norm, ())
    finite = backend.xp.isfinite(in_range.value)
    return Seen(
        finite, exceeds(in_range, threshold) & finite, exceeds(in_range, threshold, times=spikes_above) & finite
    )


def decide(
    backend: Backend,
    arrays: Arrays,
    clipping: Clipping,
    names: Callable[[], Sequence[str]],
    *,
    scope: Scope = TREE,
    mask: Array | None = None,
    holders: "Holders",
    at_once: bool = True,
) -> Decision:
    """Measure the norm of `arrays` together (or each norm of the scope) and decide what happens to them.

    `at_once`: a `Multiplier` may scale all arrays. `names` returns the arrays' names for errors. Examples outside
    `mask` count as zeros, whatever they contain. `holders` hold the whole gradient; `arrays` may be a part of it.
    Raises FloatingPointError under the policy "raise".
    """
    xp = backend.xp
    if clipping.nonfinite.raises:
        clipping.nonfinite.check_visible(backend)
    # If reading the norm is free, only non-finite gradients are read twice.
    if clipping.nonfinite.zeroes and not backend.concrete:
        arrays = backend.without_nonfinite(arrays)
    norm = _measured(backend, arrays, clipping.order, scope, mask, holders)
    if clipping.nonfinite.zeroes and backend.concrete and not xp.all(xp.isfinite(norm.value)):
        arrays = backend.without_nonfinite(arrays)
        norm = _measured(backend, arrays, clipping.order, scope, mask, holders)
    if clipping.nonfinite.raises and not xp.all(xp.isfinite(norm.value)):
        holders.raise_nonfinite(backend, arrays, names())
    made = _decided(backend, arrays, clipping, norm, scope, holders, at_once=at_once)
    if mask is None:
        return made
    chosen = replace(made.coefficient, blank=made.coefficient.blank | ~mask, keep=made.coefficient.keep & mask)
    return replace(made, coefficient=chosen)


def decide_each(
    backend: Backend, groups: Sequence[Arrays], clipping: Clipping, holders: "Holders"
) -> tuple[Norm, Coefficient | Multiplier, list[Any]]:
    """Decide for many traced groups at once; return vectors of norms and coefficients, and the arrays to scale.

    The threshold is one number for all groups, or a vector.
    """
    clipping.nonfinite.check_visible(backend)
    if clipping.nonfinite.zeroes:
        groups = list(map(backend.without_nonfinite, groups))
    norm = holders.measure_each(backend, groups, clipping.order)
    arrays = Arrays([x for group in groups for x in group])
    coefficient = _decided(backend, arrays, clipping, norm, LAYER, holders).coefficient
    if isinstance(coefficient, Multiplier):
        coefficient = replace(coefficient, sizes=list(map(len, groups)))
    return norm, coefficient, list(arrays)


def _decided(
    backend: Backend,
    arrays: Arrays,
    clipping: Clipping,
    norm: Norm,
    scope: Scope,
    holders: "Holders",
    *,
    at_once: bool = True,
) -> Decision:
    in_range = norm if norm.divisor is None else settled(backend, norm)
    several = scope.whole and not backend.concrete
    found = _multiplier(backend, arrays, clipping, in_range, holders) if several and at_once else None
    if found is not None:
        return Decision(norm, found, arrays)
    threshold = backend.scalar(clipping.max_norm, arrays)
    if several and holders.unseen_dtypes:
        threshold = nearest.beside_processes(backend, threshold)
    chosen = _chosen(backend, arrays, clipping, in_range, threshold, holders)
    return Decision(norm, clipping.nonfinite.settled(backend, backend.xp.isfinite(norm.value), chosen), arrays)


def _multiplier(
    backend: Backend, arrays: Arrays, clipping: Clipping, norm: Norm, holders: "Holders"
) -> Multiplier | None:
    """Return the one number that scales all elements; None if that does not apply."""
    order, elsewhere = clipping.order, holders.unseen_dtypes
    one_for_all = clipping.target.keeps and (order.p >= 1 or order.extreme)
    # The 2-norm of complex numbers equals that of their parts.
    by_parts = order.p == 2 or not arrays.any_complex
    everything = holders.sees_all and isinstance(norm.error, float) and isinstance(norm.floor, float)
    at_once = backend.at_once(arrays) if one_for_all and by_parts and (everything or elsewhere) else None
    if at_once is None:
        return None
    found = _bounds(backend, at_once.elements, clipping, norm, elsewhere=elsewhere)
    if found is None:
        return None
    return nearest.multiplier(backend, at_once, norm, found, blanks=clipping.nonfinite.blanks)


def _bounds(
    backend: Backend, elements: nearest.Elements, clipping: Clipping, norm: Norm, *, elsewhere: bool
) -> nearest.Bounds | None:
    max_norm, order, error, floor = clipping.max_norm, clipping.order, norm.error, norm.floor
    if elsewhere:
        return nearest.bounds_of_processes(backend, elements, max_norm, error)
    if isinstance(max_norm, np.ndarray):
        return nearest.bounds_of_each(backend, elements, order, max_norm.tolist(), error, floor)
    if isinstance(max_norm, float) and not backend.varies(max_norm):
        return nearest.bounds(elements, order, max_norm, error, floor, backend.wide)
    return nearest.bounds_on_device(backend, elements, order, backend.scalar(max_norm, ()), error, floor)


def from_norm(
    backend: Backend, total_norm: float | Array, max_norm: float | Array, arrays: Arrays
) -> Coefficient | Multiplier:
    """Return the coefficient for a norm given by the caller, which is right up to rounding to float32.

    If the norm is NaN, or negative and its value cannot be read, everything becomes NaN.
    """
    value = backend.scalar(total_norm, arrays)
    norm = Norm(backend.xp.where(value < 0, math.nan, value), None, 2.0**-23, 0.0)
    at_once = backend.at_once(arrays)
    if at_once is not None:
        # The order of the norm is unknown. Among orders >= 1, products below the normal range add the most at 1.
        asked = Clipping(max_norm, Order(1.0), PROPAGATE, CLIP)
        found = _bounds(backend, at_once.elements, asked, norm, elsewhere=False)
        if found is not None:
            known = isinstance(max_norm, float) and not backend.varies(max_norm)
            kept_up_to = max_norm if known else backend.xp.clip(backend.scalar(max_norm, arrays), 0.0, math.inf)
            return nearest.multiplier(backend, at_once, norm, replace(found, limit=kept_up_to), spoils=False)
    threshold = backend.scalar(max_norm, arrays)
    chosen = coefficient(backend, norm, threshold, split=needs_split(backend, arrays))
    return replace(chosen, keep=norm.value <= threshold)


def _measured(
    backend: Backend, arrays: Arrays, order: Order, scope: Scope, mask: Array | None, holders: "Holders"
) -> Norm:
    if scope.whole:
        return holders.measure(backend, arrays, order)
    norm = measure(backend, arrays, order, scope)
    return norm if mask is None else replace(norm, value=backend.xp.where(mask, norm.value, 0.0))


def _chosen(
    backend: Backend, arrays: Arrays, clipping: Clipping, norm: Norm, threshold: float | Array, holders: "Holders"
) -> Coefficient:
    # Processes that share a norm must compute the same coefficient, whatever parts they hold.
    split = holders.unseen_dtypes or needs_split(backend, arrays)
    chosen = coefficient(backend, norm, threshold, clipping.target, split=split)
    at_most = holders.exact_check(backend) if clipping.target.keeps else None
    if at_most is None or chosen.keep.ndim or not undecided(norm, threshold):
        return chosen
    fits = at_most(arrays, clipping.order.p, float(threshold))
    return replace(chosen, keep=backend.xp.asarray(fits))
