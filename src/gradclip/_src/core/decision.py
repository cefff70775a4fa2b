"""From measured norms and thresholds, one or several, to the coefficients that scale the elements which share a norm.

Several norms at once, in host memory: what one look at all of them decides, and what is left to decide part by part.
A norm is decided here if it is finite, lost nothing to underflow, and is so far from its threshold that the error bound
tells which is larger. It then gets the coefficient that it would get alone. The pipeline decides the other parts,
usually few or none, one by one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradclip._src.core import one_factor
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.coefficient import ERROR_OF_KNOWN, coefficient, needs_split, open_between, undecided
from gradclip._src.core.formats import FLOAT64, format_of
from gradclip._src.core.holders import ALONE, Holders
from gradclip._src.core.layouts import TREE, Groups, Layout, Scope, Several
from gradclip._src.core.nonfinite import PROPAGATE, Nonfinite
from gradclip._src.core.norms import Norm, Order, settled
from gradclip._src.core.protocols import Backend, HostBackend, is_concrete
from gradclip._src.core.rules import CLIP, Coefficient, Factors, Into, OneFactor, Target
from gradclip._src.core.values import Array

if TYPE_CHECKING:
    from gradclip._src.core.holders import Holders
    from gradclip._src.core.units import Adaptive


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
    norm = Norm(backend.xp.where(value < 0, math.nan, value), None, ERROR_OF_KNOWN, 0.0)
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


@dataclass(frozen=True)
class Each:
    """Thresholds, one for each part."""

    values: Sequence[Any]

    def at_once(self, backend: HostBackend, layout: Several, order: Order) -> tuple[np.ndarray, Any]:
        """Return a threshold for each norm, and which of them are sure."""
        return layout.each(self.values), True

    def of_part(self, backend: Backend, layout: Several, number: int, order: Order) -> Any:
        """Return the threshold of a part."""
        return self.values[number]


@dataclass(frozen=True)
class Following:
    """Thresholds that follow the norms of the units of parameters. `given`: the settings that are arrays.

    `layout` is that of the parameters, if it may differ from that of their gradients.
    """

    adaptive: "Adaptive"
    params: Arrays
    given: Sequence[Any] = ()
    layout: Several | None = None

    def at_once(self, backend: HostBackend, layout: Several, order: Order) -> tuple[np.ndarray, Any]:
        """Return a threshold for each norm, and which of them are sure."""
        if self.given:
            return np.zeros(layout.count), np.zeros(layout.count, bool)
        norm = backend.norms(self.params, order, layout)
        return np.asarray(self.adaptive.of_norm(backend, norm, self.params, ())), norm.sure

    def of_part(self, backend: Backend, layout: Several, number: int, order: Order) -> Any:
        """Return the thresholds of the units of a part."""
        indices, scope = layout.part(number)
        arrays = backend.chosen(self.params, indices)
        return self.adaptive.of_norm(backend, backend.norms(arrays, order, scope), arrays, self.given)


def together(thresholds: Sequence[float]) -> float | np.ndarray:
    """Return the thresholds as one number if all are equal, else as a vector."""
    first = thresholds[0]
    alike = all(one is first for one in thresholds) or len(set(thresholds)) == 1
    return first if alike else np.array(thresholds)


class Quick(NamedTuple):
    """The norms, the coefficient, and the numbers of the parts that are still to decide."""

    norm: Norm
    coefficient: Coefficient
    undecided: Sequence[int]


def quickly(
    backend: HostBackend, arrays: Arrays, layout: Several, order: Order, thresholds: Each | Following
) -> Quick | None:
    """Decide as many norms as possible with one look at all of them; None if that is none."""
    norm = backend.norms(arrays, order, layout)
    if not np.any(norm.sure):
        return None
    max_norms, known = thresholds.at_once(backend, layout, order)
    chosen = coefficient(backend, norm, max_norms, split=needs_split(backend, arrays))
    sure = norm.sure & known & ~np.asarray(open_between(norm, max_norms))
    return Quick(norm, chosen, () if sure.all() else layout.parts_of(~sure))


def in_lines(norm: Norm, chosen: Coefficient, count: int) -> np.ndarray:
    """Return so many norms and their coefficients as a table, in which those of single parts can be written over."""
    lines = np.empty((7, count))
    for line, values in zip(lines, (norm.product(), chosen.keep, chosen.blank, *chosen.factors()), strict=True):
        line[...] = 1.0 if values is None else np.ravel(values)
    return lines


def of_lines(lines: np.ndarray) -> tuple[Norm, Coefficient]:
    """Return the norms and coefficients of a table."""
    norms, keep, blank, *factors = lines
    wide, narrow = Factors(*factors[:2]), Factors(*factors[2:])
    return Norm(norms, None, 0.0, 0.0), Coefficient(keep != 0, blank != 0, wide, narrow)


def dtypes_of_norms(arrays: Arrays, layout: Several) -> dict[str, Sequence[int]]:
    """Return the parts whose norms have each dtype: float64 if an array of a part has that precision."""
    if FLOAT64 not in arrays.formats:
        return {"float32": range(layout.number)}
    wide = [True] * len(arrays) if len(arrays.formats) == 1 else [format_of(x) is FLOAT64 for x in arrays]
    found: dict[str, list[int]] = {}
    for number, part in enumerate(layout.parts):
        found.setdefault("float64" if any(wide[i] for i in part.indices) else "float32", []).append(number)
    return dict(found)


def left_norms(
    backend: Backend, layout: Layout, norm: Norm, arrays: Arrays, leaves: Sequence[Any], holders: Holders = ALONE
) -> list[Any]:
    """Return the norms of each part, or those of a scope, as scalars or arrays of the framework, near the leaves."""
    if isinstance(layout, Scope):
        return [backend.leave_scalar(norm.product(), holders.norm_dtype(arrays), leaves)]
    if not layout.number:
        return []
    values, found = norm.product(), dict.fromkeys(range(layout.number))
    dtypes = dtypes_of_norms(arrays, layout)
    for dtype, numbers in dtypes.items():
        if not is_concrete(backend):
            every = backend.unstacked([backend.leave_scalar(values, dtype, leaves)])[0]
            made = [every[number] for number in numbers]
        elif isinstance(layout, Groups):
            near = [[leaves[i] for i in layout.groups[number]] or leaves for number in numbers]
            made = backend.leave_each(values if len(numbers) == layout.count else values[numbers], dtype, near)
        else:
            each = layout.shaped(values)
            made = backend.leave_each([each[i] for i in numbers], dtype, [leaves[i] for i in numbers])
        found.update(zip(numbers, made, strict=True))
    return list(found.values())
