"""The driver of calls in place: measure gradients that were taken, decide, and scale them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gradclip._src.annotations import Scalar
from gradclip._src.backends.framework import OnDevice
from gradclip._src.core.decision import Clipping, Decision, Each, Following, left_norms
from gradclip._src.core.decision import together as as_vector
from gradclip._src.core.holders import Holders, Measured, Together
from gradclip._src.core.layouts import Groups, Several
from gradclip._src.core.norms import Norm, Order
from gradclip._src.core.pipeline import EachNorm, decide, decide_jointly, entries_of, measured, part_of, seen
from gradclip._src.core.protocols import Backend
from gradclip._src.core.rules import OneFactor, Seen
from gradclip._src.core.values import Array
from gradclip._src.inplace.gradients import Gradients, Taken
from gradclip._src.look import Look
from gradclip._src.passed.parameters import ParameterList


def clip_each(given: Look, max_norm: float, order: Order, params: ParameterList, each: EachNorm) -> Scalar | None:
    """Clip ordinary gradients, and give the norm of each to `each`. None if one look does not settle it."""
    sums: list[float] = []
    distinct = len(set(map(id, given.leaves))) == len(given.leaves)  # else an empty one may be listed twice
    norm = given.clip_(max_norm, order, sums) if distinct else None
    if norm is not None:
        each.take(sums, order, _owned(params, given), lambda: Gradients.of(params).names_of_layers())
    return norm


def _owned(params: ParameterList, given: Look | OnDevice) -> tuple[Sequence[Any], object]:
    """Return the parameters that hold the gradients, and how they were listed."""
    lacking = len(params.parameters) > len(given.leaves)
    owners = [one for one in params.parameters if one.grad is not None] if lacking else params.parameters
    return owners, (params.sizes, params.names)


def clip_on_device(
    given: OnDevice,
    asked: Clipping,
    skip_above: float | None,
    params: ParameterList | None,
    each: EachNorm | None,
) -> tuple[Scalar, Seen | None] | None:
    """Clip gradients that kernels on their device read, likewise. None if that is not possible."""
    order, policy = asked.order, asked.nonfinite
    if each is None and skip_above is None:
        norm = given.clip_(asked.max_norm, order, policy)
        return None if norm is None else (norm, None)
    wanted = each if params is not None and each is not None and each.wants(order) else None
    found = given.clip_watched_(asked.max_norm, order, policy, each=wanted is not None, skip_above=skip_above)
    if found is None:
        return None
    norm, norms, shown = found
    if wanted is not None and params is not None:
        wanted.take_norms(norms, _owned(params, given), lambda: Gradients.of(params).names_of_layers())
    return norm, shown


def clip_taken(
    taken: Taken, holders: Holders, asked: Clipping, skip_above: float | None, each: EachNorm | None
) -> tuple[Scalar, Seen | None]:
    """Clip gradients after all checks."""
    gradients, backend, arrays = taken
    with backend.precision():
        if each is not None:
            each.measure(backend, arrays, asked.order, gradients.names_of_layers)
        if asked.nonfinite.zeroes and holders.sees_all:
            asked = taken.cleared(asked)
        made = decide(backend, arrays, asked, gradients.names, holders=holders)
        norm = backend.leave_scalar(made.norm.product(), holders.norm_dtype(arrays), gradients.grads)
        shown = None if skip_above is None else seen(backend, made.norm, asked.max_norm, skip_above)
        taken.scale(made)
    return norm, shown


def clip_parts(
    taken: Taken, layout: Several, thresholds: Each | Following, clipping: Clipping, holders: Holders
) -> list[Any]:
    """Measure gradients, then scale them; return the norms of each part."""
    gradients, backend, arrays = taken
    if backend.concrete:
        asked = replace(clipping, max_norm=thresholds)
        made = decide(backend, arrays, asked, gradients.names, layout=layout, holders=holders)
        norms = left_norms(backend, layout, made.norm, arrays, gradients.grads)
        taken.scale(made)
        return norms
    if holders.together is not None:
        return _clip_measured(taken, layout, thresholds, clipping, holders, holders.together)
    if isinstance(layout, Groups) and isinstance(thresholds, Each):
        found = _clip_with_few_operations(taken, layout, thresholds, taken.cleared(clipping), holders)
        if found is not None:
            return found
    return _clip_one_by_one(taken, layout, thresholds, clipping, holders)


def _clip_one_by_one(
    taken: Taken, layout: Several, thresholds: Each | Following, clipping: Clipping, holders: Holders
) -> list[Any]:
    backend = taken.backend
    made, norms = [], []
    for number, (indices, scope) in enumerate(layout.parts):
        part = taken.chosen(indices)
        asked = replace(clipping, max_norm=thresholds.of_part(backend, layout, number, clipping.order))
        decision = decide(backend, part.arrays, asked, part.gradients.names, layout=scope, holders=holders)
        made.append((part, decision))
        norms += left_norms(backend, scope, decision.norm, part.arrays, part.gradients.grads, holders)
    for part, decision in made:
        part.scale(decision)
    return norms


def _clip_measured(
    taken: Taken,
    layout: Several,
    thresholds: Each | Following,
    clipping: Clipping,
    holders: Holders,
    together: Together,
) -> list[Any]:
    """Clip part by part on a device, with norms that all processes have measured together."""
    gradients, backend, arrays = taken
    clipping = taken.cleared(clipping)
    if clipping.nonfinite.zeroes:
        arrays = backend.without_nonfinite(arrays)
    norm, max_norms = measured(backend, arrays, thresholds, layout, clipping.order, together)
    if clipping.nonfinite.raises and not together.finite(backend):
        holders.raise_nonfinite(backend, arrays, gradients.names())
    if isinstance(layout, Groups) and isinstance(thresholds, Each):
        found = _clip_with_few_operations(taken, layout, thresholds, clipping, Measured(norm))
        if found is not None:
            return found
    norms = []
    for number, (indices, scope) in enumerate(layout.parts):
        part, own = taken.chosen(indices), part_of(layout, norm, number)
        max_norm = max_norms[number] if isinstance(thresholds, Each) else entries_of(layout, max_norms, number)
        asked = replace(clipping, max_norm=max_norm)
        decision = decide(backend, part.arrays, asked, gradients.names, layout=scope, holders=Measured(own))
        part.scale(decision)
        norms += left_norms(backend, scope, own, part.arrays, part.gradients.grads)
    return norms


def _clip_with_few_operations(
    taken: Taken, layout: Groups, thresholds: Each, clipping: Clipping, holders: Holders
) -> list[Any] | None:
    """Clip all groups together; return None, with nothing changed, if that is not possible."""
    backend, each = taken.backend, thresholds.values
    if layout.count < 2 or backend.multi_tensor(taken.arrays) is None:
        return None
    mine = taken.chosen([index for group in layout.groups for index in group])
    consecutive = Groups.consecutive(layout.groups)
    known = all(isinstance(threshold, float) and not backend.varies(threshold) for threshold in each)
    max_norms = as_vector(each) if known else backend.stacked([backend.scalar(one, ()) for one in each])
    asked = replace(clipping, max_norm=max_norms)
    made = decide(backend, mine.arrays, asked, mine.gradients.names, layout=consecutive, holders=holders)
    if not isinstance(made.coefficient, OneFactor):
        return None
    norms = left_norms(backend, consecutive, made.norm, mine.arrays, mine.gradients.grads)
    mine.scale(made)
    return norms


def clip_jointly(
    taken: Taken, skip_above: Sequence[float], places: Sequence[Sequence[int]], asked: Clipping, holders: Holders
) -> list[Norm]:
    """Clip each part by its norm; return the norms before clipping. NaN and infinity in one count for all.

    A part whose norm is more than `skip_above` times its threshold is set to zero.
    """
    backend = taken.backend
    filled = [number for number, group in enumerate(places) if group or holders.together is not None]
    limits, skips = ([of[number] for number in filled] for of in (asked.max_norm, skip_above))
    if asked.nonfinite.zeroes and holders.sees_all:
        asked = taken.cleared(asked)
    clip = _clip_in_host_memory if backend.concrete else _clip_elsewhere
    layout = Groups([places[number] for number in filled], joint=True)
    found = dict(zip(filled, clip(taken, layout, limits, skips, asked, holders) if filled else (), strict=True))
    nothing = backend.chosen(taken.arrays, ())
    return [found.get(number) or holders.measure(backend, nothing, asked.order) for number in range(len(places))]


def _clip_in_host_memory(
    taken: Taken, layout: Groups, limits: list[Any], skips: Sequence[float], asked: Clipping, holders: Holders
) -> list[Norm]:
    gradients, backend, arrays = taken

    def decided(limits: Sequence[float]) -> Decision:
        clipping = replace(asked, max_norm=Each(limits))
        return decide(backend, arrays, clipping, gradients.names, layout=layout, holders=holders)

    made = decided(limits)
    values = np.asarray(made.norm.product())
    norms = [Norm(value, None, 0.0, 0.0) for value in values]
    for number in [] if holders.together is not None else np.flatnonzero(np.isinf(values)).tolist():  # perhaps finite
        norms[number] = holders.measure(backend, backend.chosen(arrays, layout.groups[number]), asked.order)
    each = list(zip(norms, limits, skips, strict=True))
    if any(skip < math.inf and seen(backend, norm, limit, skip).spike for norm, limit, skip in each):
        made = decided([_unless_spike(backend, *one) for one in each])
    taken.scale(made)
    return norms


def _clip_elsewhere(
    taken: Taken, layout: Groups, limits: list[Any], skips: Sequence[float], asked: Clipping, holders: Holders
) -> list[Norm]:
    gradients, backend, arrays = taken

    def thresholds(norms: Sequence[Norm]) -> list[Any]:
        return [_unless_spike(backend, *one) for one in zip(norms, limits, skips, strict=True)]

    norms, made = decide_jointly(backend, arrays, asked, gradients.names, layout, holders, thresholds)
    for indices, decision in zip(layout.groups, made, strict=True):
        taken.chosen(indices).scale(decision)
    return norms


def _unless_spike(backend: Backend, norm: Norm, limit: float | Array, skip_above: float) -> Any:
    """Return the threshold, 0 if the norm is so many times larger."""
    if skip_above == math.inf:
        return limit
    spike = seen(backend, norm, limit, skip_above).spike
    if backend.concrete:
        return 0.0 if spike else limit
    return backend.xp.where(spike, 0.0, backend.scalar(limit, ()))
