"""From a measured norm and a threshold to the coefficient that scales the elements which share the norm."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gradclip._src.core import one_factor
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.coefficient import coefficient, needs_split, open_between, undecided
from gradclip._src.core.layouts import TREE, Layout, Scope
from gradclip._src.core.nonfinite import PROPAGATE, Nonfinite
from gradclip._src.core.norms import Norm, Order, settled
from gradclip._src.core.protocols import Backend, is_concrete
from gradclip._src.core.rules import CLIP, Coefficient, Into, OneFactor, Target
from gradclip._src.core.values import Array

if TYPE_CHECKING:
    from gradclip._src.core.holders import Holders


@dataclass(frozen=True)
class Clipping:
    """One request: a checked threshold, an order, a policy for NaN and infinity, and a target."""

    max_norm: Any
    order: Order
    nonfinite: Nonfinite
    target: Target


@dataclass(frozen=True)
class Decision:
    """The measured norms, the coefficient that follows, and the arrays to scale, with their layout."""

    norm: Norm
    coefficient: Any  # a `Coefficient`; if all elements share a norm, possibly a `OneFactor`
    arrays: Arrays
    layout: Layout

    def scaled(self, backend: Backend, into: Into | None = None) -> Sequence[Any]:
        """Return the arrays, scaled; with `into`, its leaves or their replacements."""
        if into is not None and into.leaves is not None and self.changes_nothing(backend, into.arrays):
            return into.leaves
        return backend.scale(self.arrays, self.coefficient, self.layout, into)

    def changes_nothing(self, backend: Backend, arrays: Arrays) -> bool:
        """Return whether it is known that the gradients, which are `arrays`, stay as they are."""
        known = backend.concrete and self.arrays is arrays and isinstance(self.coefficient, Coefficient)
        return known and bool(np.all(self.coefficient.keep))


def decided(
    backend: Backend,
    arrays: Arrays,
    clipping: Clipping,
    norm: Norm,
    scope: Scope,
    holders: "Holders",
    *,
    as_one: bool = True,
) -> Decision:
    """Decide what follows from the measured norm of `arrays`, or from each norm of the scope."""
    in_range = norm if norm.divisor is None else settled(backend, norm)
    several = scope.whole and not backend.concrete
    found = _one_factor(backend, arrays, clipping, in_range, holders) if several and as_one else None
    if found is not None:
        return Decision(norm, found, arrays, scope)
    threshold = backend.scalar(clipping.max_norm, arrays)
    if several and holders.unseen_dtypes:
        threshold = one_factor.beside_processes(backend, threshold)
    chosen = _chosen(backend, arrays, clipping, in_range, threshold, scope, holders)
    chosen = clipping.nonfinite.settled(backend, backend.xp.isfinite(norm.value), chosen)
    return Decision(norm, chosen, arrays, scope)


def _one_factor(
    backend: Backend, arrays: Arrays, clipping: Clipping, norm: Norm, holders: "Holders"
) -> OneFactor | None:
    """Return the one number that scales all elements; None if that does not apply."""
    order, elsewhere = clipping.order, holders.unseen_dtypes
    one_for_all = clipping.target.keeps and (order.p >= 1 or order.extreme)
    # The 2-norm of complex numbers equals that of their parts.
    by_parts = order.p == 2 or not arrays.any_complex
    everything = holders.sees_all and isinstance(norm.error, float) and isinstance(norm.floor, float)
    elements = backend.multi_tensor(arrays) if one_for_all and by_parts and (everything or elsewhere) else None
    found = None if elements is None else _bounds(backend, elements, clipping, norm, elsewhere=elsewhere)
    return None if found is None else one_factor.factor_of(backend, norm, found, blanks=clipping.nonfinite.blanks)


def _bounds(
    backend: Backend, elements: one_factor.Elements, clipping: Clipping, norm: Norm, *, elsewhere: bool
) -> one_factor.Bounds | None:
    max_norm, order, error, floor = clipping.max_norm, clipping.order, norm.error, norm.floor
    if elsewhere:
        return one_factor.bounds_of_processes(backend, elements, max_norm, error)
    if isinstance(max_norm, np.ndarray):
        return one_factor.bounds_of_each(backend, elements, order, max_norm.tolist(), error, floor)
    if isinstance(max_norm, float) and not backend.varies(max_norm):
        return one_factor.bounds(elements, order, max_norm, error, floor, backend.wide)
    return one_factor.bounds_on_device(backend, elements, order, backend.scalar(max_norm, ()), error, floor)


def from_norm(backend: Backend, total_norm: float | Array, max_norm: float | Array, arrays: Arrays) -> Decision:
    """Decide by a norm given by the caller, which is right up to rounding to float32.

    If the norm is NaN, or negative and its value cannot be read, everything becomes NaN.
    """
    value = backend.scalar(total_norm, arrays)
    norm = Norm(backend.xp.where(value < 0, math.nan, value), None, 2.0**-23, 0.0)
    elements = backend.multi_tensor(arrays)
    if elements is not None:
        # The order of the norm is unknown. Among orders >= 1, products below the normal range add the most at 1.
        asked = Clipping(max_norm, Order(1.0), PROPAGATE, CLIP)
        found = _bounds(backend, elements, asked, norm, elsewhere=False)
        if found is not None:
            known = isinstance(max_norm, float) and not backend.varies(max_norm)
            kept_up_to = max_norm if known else backend.xp.clip(backend.scalar(max_norm, arrays), 0.0, math.inf)
            found = replace(found, limit=kept_up_to)
            return Decision(norm, one_factor.factor_of(backend, norm, found, spoils=False), arrays, TREE)
    threshold = backend.scalar(max_norm, arrays)
    chosen = coefficient(backend, norm, threshold, split=needs_split(backend, arrays))
    return Decision(norm, replace(chosen, keep=norm.value <= threshold), arrays, TREE)


def _chosen(
    backend: Backend,
    arrays: Arrays,
    clipping: Clipping,
    norm: Norm,
    threshold: float | Array,
    scope: Scope,
    holders: "Holders",
) -> Coefficient:
    # Processes that share a norm must compute the same coefficient, whatever parts they hold.
    split = holders.unseen_dtypes or needs_split(backend, arrays)
    chosen = coefficient(backend, norm, threshold, clipping.target, split=split)
    at_most = holders.exact_check(backend) if clipping.target.keeps and scope.exact else None
    if at_most is None:
        return chosen
    if chosen.keep.ndim:
        return _kept_exactly(backend, arrays, clipping.order, norm, threshold, scope, chosen)
    if not undecided(norm, threshold):
        return chosen
    fits = at_most(arrays, clipping.order.p, float(threshold))
    return replace(chosen, keep=backend.xp.asarray(fits))


def _kept_exactly(
    backend: Backend, arrays: Arrays, order: Order, norm: Norm, threshold: Any, scope: Scope, chosen: Coefficient
) -> Coefficient:
    """Return the coefficient of one array's units; those within their error of the threshold are decided exactly."""
    thresholds = np.broadcast_to(np.asarray(threshold), np.shape(norm.value))
    unclear = np.asarray(open_between(norm, thresholds))
    if not unclear.any():
        return chosen
    assert is_concrete(backend)
    (x,), keep = arrays, np.array(chosen.keep)
    own = scope.own_axes(len(x.shape))
    for at in map(tuple, np.argwhere(unclear)):
        place = tuple(at[own.index(axis)] if axis in own else slice(None) for axis in range(len(x.shape)))
        keep[at] = backend.at_most(arrays, order.p, float(thresholds[at]), place)
    return replace(chosen, keep=keep)
