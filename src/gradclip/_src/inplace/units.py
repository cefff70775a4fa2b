"""Clip in place by unit: each part of a layer that produces one output has its own norm."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Unpack, overload

from gradclip._src.annotations import (
    Clips,
    Integers,
    Meshes,
    Ord,
    Owners,
    Parameters,
    Policy,
    ProcessGroups,
    Tensor,
    Threshold,
    Thresholds,
    UnitAxis,
    Where,
)
from gradclip._src.backends import any_distributed, norms_like, shards_like, whole_scalar
from gradclip._src.backends.registry import find
from gradclip._src.core.arrays import Arrays, raise_named
from gradclip._src.core.decision import Clipping, Each, Following
from gradclip._src.core.layouts import Rows
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.core.rules import CLIP
from gradclip._src.core.units import Adaptive
from gradclip._src.core.values import shape_of
from gradclip._src.distributed.processes import ONE_PROCESS
from gradclip._src.inplace.driver import clip_parts
from gradclip._src.inplace.gradients import Taken
from gradclip._src.inplace.layers import Call, Layerwise, clip_at_once, following, numbers
from gradclip._src.inplace.watched import ClipsWatched, clip_watched
from gradclip._src.monitor.monitor import Monitor
from gradclip._src.passed.arguments import check_monitor, in_place, is_single_threshold
from gradclip._src.passed.leaves import counted
from gradclip._src.passed.parameters import reusable
from gradclip._src.passed.unit_axes import (
    adaptive_of,
    check_shapes,
    rows_of,
    scopes_of_leaves,
    thresholds_of_leaves,
    weights_of,
    with_parameters,
)
from gradclip._src.public import public
from gradclip._src.tree import flatten


class _ByUnit(ClipsWatched, total=False):
    unit_axis: UnitAxis


@overload
def clip_grad_unit_norm_(
    parameters: Owners[Tensor], max_norm: Thresholds, **options: Unpack[_ByUnit]
) -> list[Tensor | None]: ...
@overload
def clip_grad_unit_norm_(parameters: Parameters, max_norm: Thresholds, **options: Unpack[_ByUnit]) -> Any: ...
@public
@in_place
def clip_grad_unit_norm_(
    parameters: Parameters,
    max_norm: Thresholds,
    *,
    ord: Ord = 2,
    unit_axis: UnitAxis = None,
    nonfinite: Policy = "propagate",
    process_group: ProcessGroups = None,
    mesh: Meshes = None,
    monitor: Monitor | None = None,
    where: Where = None,
    integers: Integers = "keep",
) -> Any:
    """Scale each unit of each gradient of `parameters` in place by min(1, max_norm / its own norm).

    Args:
        parameters: as in `gradclip.clip_grad_layer_norm_`, with dense gradients. Arrays of a tree must not share
            memory.
        max_norm: the threshold of each unit, >= 0, as in `gradclip.clip_grad_layer_norm_`: a number, a list with one
            threshold per parameter, or a dict of patterns of names. For a tree of NumPy arrays, a number, a prefix of
            the tree, or a dict of patterns.
        ord: which norm, as in `gradclip.global_norm`.
        unit_axis: the axis or axes that index the units, as in `gradclip.clip_by_unit_norm`. None for the framework's
            own layout.
        nonfinite: what to do if a unit contains NaN or infinity, as in `gradclip.clip_by_unit_norm`.
        process_group: the processes that each hold a part of every unit, as in `gradclip.clip_grad_layer_norm_`. Leave
            it out for distributed tensors, and where each process holds whole units. Parts of shape (1, n) need
            `unit_axis`.
        mesh: the same, given as a mesh.
        monitor: as in `gradclip.clip_grad_layer_norm_`, with the norms of this process's units: a step counts as
            clipped if a unit was.
        where: which gradients count, as in `gradclip.clip_grad_norm_`.
        integers: "raise" refuses integers, as there.

    Returns:
        The norms of the units before clipping: a list with one array per parameter, None for a parameter without a
        gradient, 0 for one that does not count. For a tree of NumPy arrays, a tree of arrays. If a distributed gradient
        is split so that processes
        hold different units, its norms are a distributed tensor, too.

    Raises:
        The errors of `gradclip.clip_grad_layer_norm_` and `gradclip.clip_by_unit_norm`. The gradients are then
        unchanged.

    >>> import numpy as np
    >>> update = {"w": np.array([[3.0, 0.3], [4.0, 0.4]])}
    >>> norms = clip_grad_unit_norm_(update, max_norm=1.0)
    >>> norms["w"].tolist(), update["w"].round(6).tolist()
    ([5.0, 0.5], [[0.6, 0.3], [0.8, 0.4]])

    """
    if process_group is None and mesh is None and monitor is None and where is None and integers == "keep":
        parameters = reusable(parameters)
        thresholds = partial(numbers, parameters, max_norm)
        found = clip_at_once(parameters, (ord, nonfinite), partial(rows_of, unit_axis=unit_axis), thresholds)
        if found is not None:
            return found
    call = Call.of("clip_grad_unit_norm_", parameters, process_group, mesh, where, integers)
    with call.processes.preparing():
        check_monitor(monitor)
        clipping = Clipping(None, Order.parse(ord), Nonfinite.named(nonfinite), CLIP)
        max_norm = call.spelled_out(max_norm)
        scalars = flatten(max_norm).leaves
        call.ask(clipping, max_norm=scalars, unit_axis=repr(unit_axis))
        taken = _taken(call, unit_axis, scalars)
        params = call.params
        if params.tree is not None and not is_single_threshold(max_norm):
            flat = counted(params.tree, params.choice)
            max_norm = flat.arrange(thresholds_of_leaves(flat, max_norm), 0.0)
        layers = Layerwise.of(params, max_norm, taken.backend, taken.gradients)
        mine, layout = _laid(call, taken, layers, unit_axis)
    return _clip(call, mine, layers, layout, Each(layers.thresholds), clipping, monitor)


class _Adaptively(Clips, total=False):
    params: object
    unit_axis: UnitAxis
    monitor: Monitor | None


@overload
def adaptive_grad_clip_(
    parameters: Owners[Tensor],
    clipping: Threshold = 0.01,
    eps: Threshold = 1e-3,
    ord: Ord = 2,
    **options: Unpack[_Adaptively],
) -> list[Tensor | None]: ...
@overload
def adaptive_grad_clip_(
    parameters: Parameters,
    clipping: Threshold = 0.01,
    eps: Threshold = 1e-3,
    ord: Ord = 2,
    **options: Unpack[_Adaptively],
) -> Any: ...
@public
@in_place
def adaptive_grad_clip_(
    parameters: Parameters,
    clipping: Threshold = 0.01,
    eps: Threshold = 1e-3,
    ord: Ord = 2,
    *,
    params: object = None,
    unit_axis: UnitAxis = None,
    nonfinite: Policy = "propagate",
    process_group: ProcessGroups = None,
    mesh: Meshes = None,
    monitor: Monitor | None = None,
    where: Where = None,
    integers: Integers = "keep",
) -> Any:
    """Clip each unit of the gradients in place to clipping * max(norm of the same unit of the parameters, eps).

    Args:
        parameters: as in `clip_grad_unit_norm_`. Leave out those of the last layer, as timm does.
        clipping: the largest allowed ratio of gradient norm to parameter norm, >= 0; `inf` clips nothing.
        eps: a lower limit for the parameter norm, >= 0.
        ord: which norm, as in `gradclip.global_norm`.
        params: the values of the parameters. Needed only if `parameters` are not arrays themselves: then a list with
            one array per parameter. For a tree of NumPy arrays (the gradients), a tree of the same structure.
        unit_axis: the axis or axes that index the units, as in `gradclip.clip_by_unit_norm`. None for the framework's
            own layout.
        nonfinite: what to do if a unit contains NaN or infinity, as in `gradclip.adaptive_grad_clip`.
        process_group: the processes that each hold a part of every unit, as in `clip_grad_unit_norm_`.
        mesh: the same, given as a mesh.
        monitor: as in `clip_grad_unit_norm_`: the norm that is the largest multiple of its threshold, here that of its
            weights, and that threshold.
        where: which gradients count, as in `gradclip.clip_grad_norm_`.
        integers: "raise" refuses integers, as there.

    Returns:
        The norms of the gradients' units before clipping, as `clip_grad_unit_norm_` returns them. The bound is that of
        `gradclip.adaptive_grad_clip`.

    Raises:
        TypeError: `parameters` are not arrays, and `params` is missing.
        ValueError: the shapes of `params` and gradients differ. Other errors are those of `clip_grad_unit_norm_`.

    After an error, the gradients are unchanged.

    >>> import numpy as np
    >>> update = np.array([[3.0, 0.3], [4.0, 0.4]])
    >>> weights = np.array([[6.0, 60.0], [8.0, 80.0]])
    >>> norms = adaptive_grad_clip_(update, clipping=0.1, params=weights)
    >>> norms.tolist(), update.round(6).tolist()
    ([5.0, 0.5], [[0.6, 0.3], [0.8, 0.4]])

    """
    if process_group is None and mesh is None and monitor is None and where is None and integers == "keep":
        parameters = reusable(parameters)
        thresholds = partial(following, parameters, params, (clipping, eps))
        found = clip_at_once(parameters, (ord, nonfinite), partial(rows_of, unit_axis=unit_axis), thresholds)
        if found is not None:
            return found
    call = Call.of("adaptive_grad_clip_", parameters, process_group, mesh, where, integers, own_thresholds=False)
    with call.processes.preparing():
        check_monitor(monitor)
        asked = Clipping(None, Order.parse(ord), Nonfinite.named(nonfinite), CLIP)
        scalars = [whole_scalar(clipping), whole_scalar(eps)]
        call.ask(asked, clipping=scalars[0], eps=scalars[1], unit_axis=repr(unit_axis))
        taken = _taken(call, unit_axis, scalars)
        adaptive, given = adaptive_of(taken.backend, *scalars)
        layers = Layerwise.of(call.params, 0.0, taken.backend, taken.gradients)
        mine, layout = _laid(call, taken, layers, unit_axis)
        beside = _beside(mine, weights_of(call.params, params), call.lacking)
        if taken.backend.concrete:
            adaptive, given = Adaptive(adaptive.known), []
        # Another process may have a gradient that is missing here, beside the weights.
        of_weights = Rows(layout.scopes, list(map(shape_of, beside.sources))) if call.lacking else layout
    return _clip(call, mine, layers, layout, Following(adaptive, beside, given, of_weights), asked, monitor)


def _taken(call: Call, unit_axis: UnitAxis, scalars: Sequence[object]) -> Taken:
    """Return the gradients, after all checks. Raises ValueError for shards that do not show their units."""
    call.processes.check_units()

    def shape(parameter: Any) -> list[int]:
        (scope,) = scopes_of_leaves([parameter], lambda: ["a parameter"], unit_axis)
        own = scope.own_axes(len(parameter.shape))
        return [length if axis in own else 0 for axis, length in enumerate(parameter.shape)] or [0]

    return call.taken(*scalars, shape=shape)


def _laid(call: Call, taken: Taken, layers: Layerwise, unit_axis: UnitAxis) -> tuple[Taken, Rows]:
    """Return the gradient of each layer, and the layout of their units."""
    mine = taken.chosen([index for (index,) in layers.groups.groups])
    grads = mine.gradients.grads
    if unit_axis is None:
        call.processes.check_shown(mine.gradients.held, mine.gradients.names)
    return mine, Rows(scopes_of_leaves(grads, mine.gradients.names, unit_axis), list(map(shape_of, grads)))


def _beside(mine: Taken, weights: Mapping[int, Any], lacking: Collection[int]) -> Arrays:
    """Return the weights of the layers, given by owner. Raises if one is no array or has another shape.

    `lacking` are the owners without a gradient, whose weights have nothing beside them.
    """
    gradients = mine.gradients
    chosen = [weights[id(owner)] for owner in gradients.owners]
    if any_distributed(chosen):
        chosen = list(shards_like(chosen, gradients.held))
    find([*gradients.grads, *chosen], lambda: with_parameters(gradients.names()))
    present = [i for i, owner in enumerate(gradients.owners) if id(owner) not in lacking]
    grads, beside = ([of[i] for i in present] for of in (gradients.grads, chosen))
    check_shapes(grads, beside, lambda: [gradients.names()[i] for i in present])
    try:
        return mine.backend.enter(list(map(mine.backend.prepare, chosen)))
    except TypeError:
        raise_named(mine.backend.prepare, chosen, lambda: with_parameters(gradients.names())[-len(chosen) :])
        raise


def _clip(
    call: Call,
    mine: Taken,
    layers: Layerwise,
    layout: Rows,
    thresholds: Each | Following,
    clipping: Clipping,
    monitor: Monitor | None,
) -> Any:
    """Measure all gradients, then clip them; return their norms in the caller's structure."""
    with mine.backend.precision():
        holders = call.processes.holders(mine.backend)
        if monitor is None:
            norms = clip_parts(mine, layout, thresholds, clipping, holders)
        else:
            alone = call.processes is ONE_PROCESS
            norms = clip_watched(mine, layout, thresholds, clipping, holders, (monitor, alone))
        if mine.gradients.shards is not None and any_distributed(mine.gradients.held):
            whole = mine.gradients.shards.whole(mine.gradients.shards.locals)
            norms = norms_like(norms, whole, [units.own for units in layout.units])
        return layers.arranged(norms)
