"""From arrays and thresholds to norms and coefficients: the one path for all ways of clipping, for any layout."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import call, is_
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from gradclip._src.core.arrays import Arrays
from gradclip._src.core.coefficient import coefficient, exceeds, open_between
from gradclip._src.core.decision import Clipping, Decision, Each, Following, decided, in_lines, of_lines, quickly
from gradclip._src.core.holders import ALONE, Held, Holders, Measured, Together
from gradclip._src.core.layouts import LAYER, TREE, Groups, Layout, Rows, Scope, Several
from gradclip._src.core.norms import Norm, Order, settled
from gradclip._src.core.protocols import Backend, HostBackend, is_concrete
from gradclip._src.core.rules import Coefficient, OneFactor, Seen
from gradclip._src.core.values import Array

if TYPE_CHECKING:
    from gradclip._src.core.holders import Holders


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
    layout: Layout = TREE,
    mask: Array | None = None,
    holders: "Holders",
    as_one: bool = True,
) -> Decision:
    """Measure `arrays`, each norm of the layout, and decide what happens to them.

    `as_one`: a `OneFactor` may scale all arrays. `names` returns the arrays' names for errors. Examples outside
    `mask` count as zeros, whatever they contain. `holders` hold the whole gradient; `arrays` may be a part of it.
    Raises FloatingPointError under the policy "raise".
    """
    if isinstance(layout, Groups | Rows):
        if holders.together is not None and backend.concrete:
            return decide_together(backend, arrays, clipping, names, layout, holders, holders.together)
        if is_concrete(backend):
            return _decide_in_host_memory(backend, arrays, clipping, names, layout, holders)
        assert isinstance(layout, Groups)  # callers clip units one array at a time
        return _decide_without_values(backend, arrays, clipping, names, layout, holders)
    xp = backend.xp
    if clipping.nonfinite.raises:
        clipping.nonfinite.check_visible(backend)
    # If reading the norm is free, only non-finite gradients are read twice.
    if clipping.nonfinite.zeroes and not backend.concrete:
        arrays = backend.without_nonfinite(arrays)
    norm = _measured(backend, arrays, clipping.order, layout, mask, holders)
    if clipping.nonfinite.zeroes and backend.concrete and not xp.all(xp.isfinite(norm.value)):
        arrays = backend.without_nonfinite(arrays)
        norm = _measured(backend, arrays, clipping.order, layout, mask, holders)
    if clipping.nonfinite.raises and not xp.all(xp.isfinite(norm.value)):
        holders.raise_nonfinite(backend, arrays, names())
    made = decided(backend, arrays, clipping, norm, layout, holders, as_one=as_one)
    if mask is None:
        return made
    chosen = replace(made.coefficient, blank=made.coefficient.blank | ~mask, keep=made.coefficient.keep & mask)
    return replace(made, coefficient=chosen)


def measure_all(backend: Backend, arrays: Arrays, layout: Layout, order: Order, holders: "Holders") -> Norm:
    """Return the norms of all groups as a vector, or those of a scope."""
    if isinstance(layout, Scope):
        return _measured(backend, arrays, order, layout, None, holders)
    if holders.together is not None:
        return holders.together.measure_parts(backend, [Held(arrays, layout)], order)[0]
    if not is_concrete(backend):
        assert isinstance(layout, Groups)
        return holders.measure_each(backend, arrays, order, layout)
    found = backend.norms(arrays, order, layout)
    if np.all(found.sure):
        return found
    values = np.array(found.value)
    for number in layout.parts_of(~found.sure):
        indices, scope = layout.part(number)
        norm = _measured(backend, backend.chosen(arrays, indices), order, scope, None, holders)
        values[layout.places(number)] = norm.product().ravel()
    return Norm(values, None, 0.0, 0.0)


def _decide_in_host_memory(
    backend: HostBackend,
    arrays: Arrays,
    clipping: Clipping,
    names: Callable[[], Sequence[str]],
    layout: Several,
    holders: "Holders",
) -> Decision:
    """Decide with one look at all norms; what that leaves undecided, part by part."""
    thresholds, order = clipping.max_norm, clipping.order
    known = quickly(backend, arrays, layout, order, thresholds) if clipping.target.keeps else None
    if known is not None and not known.undecided:
        return Decision(known.norm, known.coefficient, arrays, layout)
    waiting = range(layout.number) if known is None else known.undecided
    if layout.joint and not clipping.nonfinite.zeroes:
        parts = (backend.chosen(arrays, layout.part(number).indices) for number in waiting)
        if not all(np.isfinite(holders.measure(backend, part, order).value) for part in parts):
            one = decide(backend, arrays, replace(clipping, max_norm=math.inf), names, holders=holders)
            return replace(one, norm=measure_all(backend, arrays, layout, order, holders))
    lines = np.empty((7, layout.count)) if known is None else in_lines(known.norm, known.coefficient, layout.count)
    finite = True
    for number in waiting:
        indices, scope = layout.part(number)
        part = backend.chosen(arrays, indices)
        asked = replace(clipping, max_norm=thresholds.of_part(backend, layout, number, order))
        made = decide(backend, part, asked, partial(_chosen_names, names, indices), layout=scope, holders=holders)
        finite = finite and made.arrays is part
        places = layout.places(number)
        lines[:, places] = in_lines(made.norm, made.coefficient, places.stop - places.start)
    new = arrays if finite else backend.without_nonfinite(arrays)
    return Decision(*of_lines(lines), new, layout)


def decide_jointly(
    backend: Backend,
    arrays: Arrays,
    clipping: Clipping,
    names: Callable[[], Sequence[str]],
    layout: Groups,
    holders: "Holders",
    thresholds: Callable[[Sequence[Norm]], Sequence[Any]],
) -> tuple[list[Norm], list[Decision]]:
    """Measure each group where values cannot be read, and decide for each what happens to it.

    `thresholds` returns the threshold of each group, given all norms. NaN and infinity in one group count for all.
    """
    clipping.nonfinite.check_visible(backend)
    if clipping.nonfinite.zeroes:
        arrays = backend.without_nonfinite(arrays)
    parts = [backend.chosen(arrays, part.indices) for part in layout.parts]
    if holders.together is not None:
        of_all = measure_all(backend, arrays, layout, clipping.order, holders)
        norms = [part_of(layout, of_all, number) for number in range(layout.number)]
        finite = holders.together.finite(backend)
    else:
        norms = [holders.measure(backend, part, clipping.order) for part in parts]
        finite = backend.xp.all(backend.xp.isfinite(backend.xp.stack([norm.value for norm in norms])))
    if clipping.nonfinite.raises and not finite:
        holders.raise_nonfinite(backend, arrays, names())
    judged = [replace(norm, value=backend.xp.where(finite, norm.value, math.nan)) for norm in norms]
    each = zip(parts, judged, thresholds(norms), strict=True)

    def holders_of(norm: Norm) -> "Holders":
        return holders if holders.together is None else Measured(norm)

    return norms, [
        decided(backend, part, replace(clipping, max_norm=limit), norm, TREE, holders_of(norm))
        for part, norm, limit in each
    ]


def _decide_without_values(
    backend: Backend,
    arrays: Arrays,
    clipping: Clipping,
    names: Callable[[], Sequence[str]],
    layout: Groups,
    holders: "Holders",
) -> Decision:
    """Decide for consecutive groups. The threshold is one number for all of them, or a vector."""
    clipping.nonfinite.check_visible(backend)
    if clipping.nonfinite.zeroes:
        arrays = backend.without_nonfinite(arrays)
    norm = measure_all(backend, arrays, layout, clipping.order, holders)
    if clipping.nonfinite.raises:
        _raise_if_any(backend, arrays, norm, names, layout, holders)
    made = decided(backend, arrays, clipping, norm, LAYER, holders)
    if isinstance(made.coefficient, OneFactor):
        made = replace(made, coefficient=replace(made.coefficient, sizes=list(map(len, layout.groups))))
    return replace(made, layout=layout)


def _raise_if_any(
    backend: Backend,
    arrays: Arrays,
    norm: Norm,
    names: Callable[[], Sequence[str]],
    layout: Groups,
    holders: "Holders",
) -> None:
    """Raise a FloatingPointError for the first group whose norm is not finite, if there is one.

    Several holders name all, since each knows only its own.
    """
    if holders.together is not None and not holders.together.finite(backend):
        holders.raise_nonfinite(backend, arrays, names())
    finite = backend.xp.isfinite(norm.value)
    if not backend.xp.all(finite):
        number = next(number for number, one in enumerate(backend.unstacked([finite])[0]) if not one)
        indices = layout.groups[number]
        holders.raise_nonfinite(backend, backend.chosen(arrays, indices), _chosen_names(names, indices))


def _chosen_names(names: Callable[[], Sequence[str]], indices: Sequence[int]) -> list[str]:
    every = names()
    return [every[index] for index in indices]


def _measured(
    backend: Backend, arrays: Arrays, order: Order, scope: Scope, mask: Array | None, holders: "Holders"
) -> Norm:
    if scope.whole:
        return holders.measure(backend, arrays, order)
    norm = holders.measure_units(backend, arrays, order, scope)
    return norm if mask is None else replace(norm, value=backend.xp.where(mask, norm.value, 0.0))


class Names:
    """The names of gradients, found once for calls that list the same owners of gradients in the same way.

    The owners are not kept alive: a monitor may outlive the model.
    """

    def __init__(self) -> None:
        self._last: tuple[Sequence[ref[Any]], object, Sequence[str]] = (), None, ()

    def of(self, owners: Sequence[Any], way: object, names: Callable[[], Sequence[str]]) -> Sequence[str]:
        """Return the names of gradients with these owners, listed in this way."""
        last, before, known = self._last
        if len(owners) == len(last) and way == before and all(map(is_, owners, map(call, last))):
            return known
        found = names()
        try:
            self._last = list(map(ref, owners)), way, found
        except TypeError:  # some owners allow no weak references
            self._last = (), None, ()
        return found


class EachNorm:
    """The names of the gradients and a vector of their norms, as the first measurement finds them, before the clip.

    Both are None if nothing was measured. Norms of an order that takes long to measure are measured only if `asked`.
    """

    def __init__(self, found: Names | None = None, *, asked: bool = True) -> None:
        self._asked = asked
        self.names: Sequence[str] | None = None
        self.norms: Any = None
        self._found = Names() if found is None else found

    def of(self, indices: Sequence[int], stack: Callable[[Sequence[Array]], Array]) -> "EachNorm":
        """Return the names and norms of some of the gradients. A list of indices would wait for a device."""
        chosen = EachNorm()
        if self.names is not None:
            chosen.names = [self.names[index] for index in indices]
            chosen.norms = stack([self.norms[index] for index in indices]) if indices else self.norms[:0]
        return chosen

    def take(
        self,
        sums: Sequence[float],
        order: Order,
        owned: tuple[Sequence[Any], object],
        names: Callable[[], Sequence[str]],
    ) -> None:
        """Take the sums of powers of the gradients, and who owns them, listed in which way. `names` finds names."""
        self.take_norms(np.sqrt(sums) if order.p == 2 else np.array(sums), owned, names)

    def take_norms(self, norms: Array, owned: tuple[Sequence[Any], object], names: Callable[[], Sequence[str]]) -> None:
        """Take the norms of the gradients likewise."""
        if self.names is None:
            self.norms = norms
            self.names = self._found.of(*owned, names) if owned[0] else names()

    def measure(self, backend: Backend, arrays: Arrays, order: Order, names: Callable[[], Sequence[str]]) -> None:
        """Measure arrays, all of which this process holds."""
        if arrays and self.wants(order):
            norm = measure_all(backend, arrays, Groups.each_alone(len(arrays)), order, ALONE)
            self.put(norm.product(), names())

    def wants(self, order: Order) -> bool:
        """Return whether norms of this order are still to be measured."""
        return self.names is None and (self._asked or order.p == 2)

    def put(self, norms: Array, names: Sequence[str]) -> None:
        """Take norms that others have measured."""
        self.norms, self.names = norms, names
