"""Several norms of which each holder has parts: measured in one step, then decided as those of one holder are."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gradclip._src.core.arrays import Arrays
from gradclip._src.core.coefficient import coefficient, open_between
from gradclip._src.core.decision import Clipping, Decision
from gradclip._src.core.holders import Held, Holders, Together
from gradclip._src.core.layouts import Groups, Several
from gradclip._src.core.norms import Norm, Order, settled
from gradclip._src.core.protocols import Backend
from gradclip._src.core.rules import Coefficient
from gradclip._src.core.several import Each, Following


def decide_together(
    backend: Backend,
    arrays: Arrays,
    clipping: Clipping,
    names: Callable[[], Sequence[str]],
    layout: Several,
    holders: Holders,
    together: Together,
) -> Decision:
    """Decide for arrays in host memory. All holders measure again where one has to set elements to zero."""
    order, policy = clipping.order, clipping.nonfinite
    norm, max_norms = measured(backend, arrays, clipping.max_norm, layout, order, together)
    if policy.zeroes and not together.finite(backend):
        arrays = backend.without_nonfinite(arrays)
        norm, max_norms = measured(backend, arrays, clipping.max_norm, layout, order, together)
    if policy.raises and not together.finite(backend):
        holders.raise_nonfinite(backend, arrays, names())
    in_range = settled(backend, norm)
    chosen = coefficient(backend, in_range, max_norms, clipping.target, split=True)
    if clipping.target.keeps:
        chosen = _kept_exactly(backend, Held(arrays, layout), order, in_range, max_norms, chosen, together)
    finite = backend.xp.isfinite(norm.value)
    if layout.joint and not policy.zeroes:
        finite = np.full(np.shape(finite), bool(together.finite(backend)))
    chosen = policy.settled(backend, finite, chosen)
    return Decision(norm, chosen, arrays, layout)


def measured(
    backend: Backend, arrays: Arrays, thresholds: Each | Following, layout: Several, order: Order, together: Together
) -> tuple[Norm, Any]:
    """Return the norms and the threshold of each. Thresholds that follow the norms of weights are measured with them.

    On a device, thresholds that do not follow norms are those of the parts.
    """
    if isinstance(thresholds, Each):
        (norm,) = together.measure_parts(backend, [Held(arrays, layout)], order)
        return norm, layout.each(thresholds.values) if backend.concrete else thresholds.values
    beside = Held(thresholds.params, thresholds.layout or layout)
    norm, of_weights = together.measure_parts(backend, [Held(arrays, layout), beside], order)
    return norm, thresholds.adaptive.of_norm(backend, of_weights, thresholds.params, thresholds.given)


def _kept_exactly(
    backend: Backend,
    held: Held,
    order: Order,
    norm: Norm,
    max_norms: np.ndarray,
    chosen: Coefficient,
    together: Together,
) -> Coefficient:
    """Return the coefficient of norms within their error of the threshold as exact arithmetic decides them."""
    unclear = np.asarray(open_between(norm, max_norms)) & np.isfinite(norm.value)
    kept = together.at_most_each(backend, held, order, max_norms, unclear)
    return replace(chosen, keep=np.where(unclear, kept, chosen.keep)) if unclear.any() else chosen


def part_of(layout: Several, norm: Norm, number: int) -> Norm:
    """Return the norm of a part, or the norms of its scope."""
    value, divisor, error, floor = (
        entries_of(layout, one, number) for one in (norm.value, norm.divisor, norm.error, norm.floor)
    )
    return Norm(value, divisor, error, floor)


def entries_of(layout: Several, values: Any, number: int) -> Any:
    """Return the entries of a part in the shape of its norms. What is one for all, or None, is returned unchanged."""
    if not getattr(values, "ndim", 0):
        return values
    if isinstance(layout, Groups):
        return values[number]
    return values[layout.places(number)].reshape(layout.units[number].norms_shape)
