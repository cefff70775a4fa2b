"""The driver of functional calls: measure or clip the leaves of a tree, for any layout and framework.

Without a derivative, one pass clips all leaves in host memory. Where a derivative may be asked for, or values are not
known, groups of leaves whose norms can share a vector are clipped together, and the others one by one.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeGuard

import optree

from gradclip._src.annotations import AxisName, Integers, UnitAxis, Where
from gradclip._src.backends import any_distributed, whole_scalar
from gradclip._src.backends.registry import find
from gradclip._src.core.arrays import Arrays, raise_named
from gradclip._src.core.decision import Clipping, Each, Following, left_norms
from gradclip._src.core.holders import ALONE, Holders
from gradclip._src.core.layouts import LAYER, Groups, Rows, Scope, Several
from gradclip._src.core.nonfinite import PROPAGATE
from gradclip._src.core.norms import Order
from gradclip._src.core.pipeline import decide, measure_all
from gradclip._src.core.protocols import Backend, HostBackend, is_concrete
from gradclip._src.core.rules import CLIP, Into
from gradclip._src.core.units import Adaptive
from gradclip._src.distributed.processes import holders_of, over_axes, processes_of
from gradclip._src.functional.differentiable import DifferentiableClip, batches_of, shared_threshold
from gradclip._src.inplace.gradients import Gradients
from gradclip._src.look import NO_LIMIT, Look, known_threshold, known_thresholds, read, read_on_device
from gradclip._src.passed.arguments import check_thresholds, of_each, scalar_array, warn_of_parameters
from gradclip._src.passed.leaves import EVERY, Choice, counted, names_of, taken
from gradclip._src.passed.parameters import ParameterList
from gradclip._src.passed.unit_axes import (
    adaptive_of,
    check_shapes,
    check_shown,
    parameters_of,
    rows_of,
    scopes_of,
    with_parameters,
)
from gradclip._src.tree import FlatTree, flattened

_Run = tuple[Sequence[int], DifferentiableClip, Any, Sequence[Any]]
"""The numbers of norms, the batch that they come from, its thresholds if they are an array, and what is beside it."""


class Leaves:
    """The leaves of a tree. `known`: the same as ordinary arrays, if they are."""

    __slots__ = ("_flat", "_structure", "known")

    def __init__(self, flat: FlatTree | None, known: Look | None = None, structure: Any = None) -> None:
        self._flat, self.known, self._structure = flat, known, structure

    @property
    def flat(self) -> FlatTree:
        """The flattened tree."""
        if self._flat is None:
            assert self.known is not None
            self._flat = flattened(list(self.known.leaves), self._structure)
        return self._flat

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return a tree of the same structure from new leaves."""
        return optree.tree_unflatten(self._structure, leaves) if self._flat is None else self._flat.rebuild(leaves)


def leaves_of(tree: object, axis_name: AxisName = None, where: Where = None, integers: Integers = "keep") -> Leaves:
    """Return the leaves of a tree. Raises like `counted`."""
    choice = EVERY if where is None and integers == "keep" else Choice(where, integers)
    if axis_name is not None:
        return Leaves(counted(tree, choice))
    if where is None:
        leaves, structure = optree.tree_flatten(tree)
        known = read(leaves)
        if known is not None:
            return Leaves(None, known, structure)
    flat = counted(tree, choice)
    unread = where is not None or flat.others
    return Leaves(flat, read(flat.leaves) if unread and not flat.sparse else None)


def clip_groups(
    leaves: Leaves, layout: Groups | Scope, max_norms: Sequence[Any], clipping: Clipping, axis_name: AxisName = None
) -> tuple[list[Any], list[Any]]:
    """Clip the leaves of each group by their common norm; return all leaves in order, and the norms.

    The layout is `Groups`, or `LAYER` for all leaves together, with one threshold and one norm.
    """
    found = None
    if leaves.known is not None:
        found = _clip_known(leaves.known, layout, max_norms, clipping.order)
    elif isinstance(layout, Scope) and axis_name is None:
        found = _clip_on_device(leaves.flat, max_norms[0], clipping)
    return _clip_carefully(leaves, layout, max_norms, clipping, axis_name) if found is None else found


def _clip_known(
    known: Look, layout: Several | Scope, max_norms: Sequence[Any], order: Order
) -> tuple[list[Any], list[Any]] | None:
    """Clip ordinary leaves with one look. None if it does not settle all norms."""
    if isinstance(layout, Scope):
        limit = known_threshold(max_norms[0])
        return None if limit is None else known.clipped(limit, order)
    limits = known_thresholds(max_norms)
    found = None if limits is None else known.clipped_several(layout, layout.each(limits), order)
    return None if found is None else (found[0], known.left(layout, found[1]))


def _clip_on_device(flat: FlatTree, max_norm: Any, clipping: Clipping) -> tuple[list[Any], list[Any]] | None:
    """Clip leaves that kernels on their device read, by their common norm. None if that is not possible."""
    given = read_on_device(flat.leaves)
    known = None if given is None else known_threshold(max_norm)
    threshold = given.threshold(max_norm) if given is not None and known is None else known
    if given is None or threshold is None:
        return None
    found = given.clipped(threshold, clipping.order, clipping.nonfinite)
    return None if found is None else (found[0], [found[1]])


def norms_of_groups(leaves: Leaves, layout: Groups | Scope, order: Order, axis_name: AxisName = None) -> list[Any]:
    """Return the norm of each group of leaves, or of all leaves, as for `clip_groups`."""
    found = None
    if leaves.known is not None:
        found = _norms_of_known(leaves.known, layout, order)
    elif isinstance(layout, Scope) and axis_name is None:
        given = read_on_device(leaves.flat.leaves)
        norm = None if given is None else given.norm(order)
        found = None if norm is None else [norm]
    if found is not None:
        return found
    return _clip_carefully(leaves, layout, None, Clipping(math.inf, order, PROPAGATE, CLIP), axis_name)[1]


def _norms_of_known(known: Look, layout: Groups | Scope, order: Order) -> list[Any] | None:
    if isinstance(layout, Scope):
        norm = known.norm(order)
        return None if norm is None else [norm]
    found = known.settled(layout, NO_LIMIT, order)
    return None if found is None else known.left(layout, found.norms)


def _clip_carefully(
    leaves: Leaves,
    layout: Groups | Scope,
    max_norms: Sequence[Any] | None,
    clipping: Clipping,
    axis_name: AxisName,
) -> tuple[list[Any], list[Any]]:
    """Clip what one look does not settle. Without thresholds, only return the norms."""
    flat = leaves.flat
    if isinstance(layout, Groups) and axis_name is None and any_distributed(flat.leaves):
        found = _clip_shards(flat, layout, max_norms, clipping)
        if found is not None:
            return found
    backend, holders, arrays, thresholds, given = _taken(leaves, max_norms, axis_name)
    if arrays is None:
        groups = layout.groups if isinstance(layout, Groups) else [range(len(flat.leaves))]
        each = ([math.inf] * len(groups), [None] * len(groups)) if max_norms is None else (thresholds, given)
        batches = _batches(backend, holders, flat, groups, each, clipping)
        return _run(flat, batches, len(groups), with_leaves=max_norms is not None)
    layout = layout if isinstance(layout, Groups) and layout.count != 1 else LAYER
    with backend.precision():
        if max_norms is None:
            norm = measure_all(backend, arrays, layout, clipping.order, holders)
            return [], left_norms(backend, layout, norm, arrays, flat.leaves, holders)
        asked = replace(clipping, max_norm=thresholds[0] if layout is LAYER else Each(thresholds))
        made = decide(backend, arrays, asked, partial(names_of, flat), layout=layout, holders=holders)
        norms = left_norms(backend, layout, made.norm, arrays, flat.leaves, holders)
        return backend.leave_all(made.scaled(backend), flat.leaves), norms


def _clip_shards(
    flat: FlatTree, layout: Groups, max_norms: Sequence[Any] | None, clipping: Clipping
) -> tuple[list[Any], list[Any]] | None:
    """Clip distributed leaves, with one reduction for all norms; None if a derivative may be asked for."""
    warn_of_parameters(flat.leaves)
    params = ParameterList([SimpleNamespace(grad=leaf) for leaf in flat.leaves], names=names_of(flat))
    thresholds = [whole_scalar(one) for one in max_norms or ()]
    processes = processes_of(params, None, None, each=True)
    backend = find(params.shards(flat.leaves, flat.leaves).locals, flat.paths, *thresholds)
    if not _in_one_pass(backend, flat.leaves, of_each(scalar_array, thresholds)):
        return None
    with processes.preparing():
        processes.ask(clipping.order, clipping.nonfinite, more=[("the tree's thresholds", thresholds)])
        gradients = Gradients.of(params)
        checked = check_thresholds(thresholds, backend)
    with backend.precision():
        arrays, holders = backend.take(gradients.grads), processes.holders(backend)
        asked = replace(clipping, max_norm=Each(checked or [math.inf] * layout.count))
        if max_norms is None:
            norm = measure_all(backend, arrays, layout, clipping.order, holders)
            return [], left_norms(backend, layout, norm, arrays, gradients.grads)
        made = decide(backend, arrays, asked, partial(names_of, flat), layout=layout, holders=holders)
        norms = left_norms(backend, layout, made.norm, arrays, gradients.grads)
        clipped = backend.leave_all(made.scaled(backend), gradients.grads)
        return list(gradients.shards.whole(clipped) if gradients.shards else clipped), norms


def _taken(
    leaves: Leaves, max_norms: Sequence[Any] | None, axis_name: AxisName
) -> tuple[Backend, Holders, Arrays | None, Sequence[Any], Sequence[Any]]:
    """Return the leaves as arrays if all values are known, the checked thresholds, and those that are scalar arrays."""
    known, flat = leaves.known, leaves.flat
    max_norms = max_norms or ()
    thresholds = None if known is None else known_thresholds(max_norms)
    if known is not None and thresholds is not None:
        return known.backend, ALONE, known.arrays(), thresholds, ()
    warn_of_parameters(flat.leaves)
    backend, holders = backend_and_holders(flat, axis_name, *max_norms)
    checked, given = check_thresholds(max_norms, backend), of_each(scalar_array, max_norms)
    if not _in_one_pass(backend, flat.leaves, given):
        return backend, holders, None, checked, given
    with backend.precision():
        return backend, holders, taken(backend, flat.leaves, partial(names_of, flat)), checked, given


def _batches(
    backend: Backend,
    holders: Holders,
    flat: FlatTree,
    groups: Sequence[Sequence[int]],
    thresholds: tuple[Sequence[Any], Sequence[Any]],
    clipping: Clipping,
) -> Iterator[_Run]:
    """Yield groups that can share a vector of norms; `thresholds` are the checked ones, and the arrays."""
    outline = flat.outline(backend.types_of(flat.leaves))
    for numbers in batches_of(backend, flat.leaves, groups, thresholds[0]):
        known, traced = shared_threshold(backend, *([each[n] for n in numbers] for each in thresholds))
        asked = replace(clipping, max_norm=known)
        yield numbers, DifferentiableClip.of(backend, holders, [groups[n] for n in numbers], asked, outline), traced, ()


def _run(
    flat: FlatTree, batches: Iterable[_Run], count: int, *, with_leaves: bool = True
) -> tuple[list[Any], list[Any]]:
    """Clip the leaves batch by batch; return all leaves in order, if requested, and the norms."""
    clipped: list[Any] = list(flat.leaves)
    norms: list[Any] = [None] * count
    for numbers, batch, traced, beside in batches:
        try:
            results, found = batch.run(flat.leaves, traced, beside=beside, with_leaves=with_leaves)
        except TypeError:
            raise_named(batch.backend.prepare, flat.leaves, partial(names_of, flat))
            if beside:  # the parameter of an only leaf
                raise_named(batch.backend.prepare, beside[:1], partial(parameters_of, flat, batch.indices))
            raise
        for place, result in zip(batch.indices if with_leaves else (), results, strict=True):
            clipped[place] = result
        for number, norm in zip(numbers, found, strict=True):
            norms[number] = norm
    return clipped, norms


def clip_units(
    leaves: Leaves,
    thresholds_of: Callable[[FlatTree], Sequence[Any]],
    clipping: Clipping,
    unit_axis: UnitAxis,
    axis_name: AxisName = None,
) -> tuple[list[Any], Any]:
    """Clip the units of each leaf to its threshold; return the leaves and a tree of the norms of their units."""
    flat, known = leaves.flat, leaves.known
    max_norms = thresholds_of(flat)
    layout = None if known is None else rows_of(known.leaves, unit_axis)
    found = None if known is None or layout is None else _clip_known(known, layout, max_norms, clipping.order)
    if known is not None and found is not None:
        return found[0], _arranged(known.backend, flat, found[1])
    return clip_by_scopes(flat, max_norms, clipping, _scopes_of(flat, unit_axis, axis_name), axis_name)


def _scopes_of(flat: FlatTree, unit_axis: UnitAxis, axis_name: AxisName) -> list[Scope]:
    """Return the scope of each leaf's units. Raises ValueError for a part of a leaf that does not show its units."""
    scopes = scopes_of(flat, unit_axis)
    if axis_name is not None and unit_axis is None:
        check_shown(flat.leaves, partial(names_of, flat), "axis_name")
    return scopes


def clip_by_scopes(
    flat: FlatTree,
    max_norms: Sequence[Any],
    clipping: Clipping,
    scopes: Sequence[Scope],
    axis_name: AxisName = None,
) -> tuple[list[Any], Any]:
    """Do the same, given the scope of each leaf's units."""
    warn_of_parameters(flat.leaves)
    backend, holders = backend_and_holders(flat, axis_name, *max_norms)
    thresholds, given = check_thresholds(max_norms, backend), of_each(scalar_array, max_norms)
    if _in_one_pass(backend, flat.leaves, given):
        return _clip_units_in_one_pass(backend, flat, Each(thresholds), clipping, scopes)
    each = [replace(clipping, max_norm=one if isinstance(one, float) else None) for one in thresholds]
    holders = ALONE if axis_name is None else holders
    return _clip_one_by_one(backend, holders, flat, each, scopes, given, [()] * len(each))


def clip_units_adaptively(
    leaves: Leaves,
    params: Sequence[Any],
    both: tuple[Any, Any],
    clipping: Clipping,
    unit_axis: UnitAxis,
    axis_name: AxisName = None,
) -> tuple[list[Any], Any]:
    """Clip the units of each leaf likewise, to thresholds from its parameter; `both` are `clipping` and `eps`."""
    found = None if leaves.known is None else _clip_known_adaptively(leaves.known, params, both, clipping, unit_axis)
    if leaves.known is not None and found is not None:
        return found[0], _arranged(leaves.known.backend, leaves.flat, found[1])
    scopes = _scopes_of(leaves.flat, unit_axis, axis_name)
    return clip_adaptively_by_scopes(leaves.flat, params, both, clipping, scopes, axis_name)


def _clip_known_adaptively(
    known: Look, params: Sequence[Any], both: tuple[Any, Any], clipping: Clipping, unit_axis: UnitAxis
) -> tuple[list[Any], list[Any]] | None:
    limits, layout = known_thresholds(both), rows_of(known.leaves, unit_axis)
    beside = read(params)
    if limits is None or layout is None or beside is None or beside.backend is not known.backend:
        return None
    thresholds = beside.followed(layout, clipping.order, (limits[0], limits[1]))
    found = None if thresholds is None else known.clipped_several(layout, thresholds, clipping.order)
    return None if found is None else (found[0], known.left(layout, found[1]))


def clip_adaptively_by_scopes(
    flat: FlatTree,
    params: Sequence[Any],
    both: tuple[Any, Any],
    clipping: Clipping,
    scopes: Sequence[Scope],
    axis_name: AxisName = None,
) -> tuple[list[Any], Any]:
    """Do the same, given the scope of each leaf's units."""
    warn_of_parameters(flat.leaves)
    check_shapes(flat.leaves, params, partial(names_of, flat))
    backend = find([*flat.leaves, *params], lambda: with_parameters(names_of(flat)), *both)
    adaptive, given = adaptive_of(backend, *both)
    holders: Holders = ALONE
    if axis_name is not None and flat.leaves:
        backend, holders = over_axes(backend, axis_name)
    if _in_one_pass(backend, [*flat.leaves, *params], given):
        with backend.precision():
            following = Following(Adaptive(adaptive.known), taken(backend, params, partial(parameters_of, flat)))
        return _clip_units_in_one_pass(backend, flat, following, clipping, scopes)
    each, beside = [replace(clipping, max_norm=math.inf)] * len(params), [[param, *given] for param in params]
    return _clip_one_by_one(backend, holders, flat, each, scopes, [None] * len(params), beside, adaptive)


def _clip_one_by_one(
    backend: Backend,
    holders: Holders,
    flat: FlatTree,
    clippings: Sequence[Clipping],
    scopes: Sequence[Scope],
    given: Sequence[Any],
    beside: Sequence[Sequence[Any]],
    adaptive: Adaptive | None = None,
) -> tuple[list[Any], Any]:
    outline = flat.outline(backend.types_of(flat.leaves))
    batches = [
        ([index], DifferentiableClip.of(backend, holders, [[index]], asked, outline, scope, adaptive), traced, more)
        for index, (asked, scope, traced, more) in enumerate(zip(clippings, scopes, given, beside, strict=True))
    ]
    leaves, norms = _run(flat, batches, len(batches))
    return leaves, _arranged(backend, flat, norms)


def backend_and_holders(flat: FlatTree, axis_name: AxisName, *scalars: object) -> tuple[Backend, Holders]:
    """Return the backend of a tree and its thresholds, over the mesh axes if any are named, and its holders."""
    backend = find(flat.leaves, flat.paths, *scalars)
    return (backend, holders_of(backend)) if axis_name is None or not flat.leaves else over_axes(backend, axis_name)


def _in_one_pass(backend: Backend, leaves: Sequence[Any], given: Sequence[Any] = ()) -> TypeGuard[HostBackend]:
    """Return whether all values are known and no derivative is asked for."""
    return is_concrete(backend) and backend.plain([*leaves, *{id(x): x for x in given if x is not None}.values()])


def _clip_units_in_one_pass(
    backend: HostBackend, flat: FlatTree, thresholds: Each | Following, clipping: Clipping, scopes: Sequence[Scope]
) -> tuple[list[Any], Any]:
    asked = replace(clipping, max_norm=thresholds)
    with backend.precision():
        # The kernels scale units only in place.
        arrays = backend.copied(taken(backend, flat.leaves, partial(names_of, flat)))
        layout = Rows(scopes, [tuple(x.shape) for x in arrays.sources])
        made = decide(backend, arrays, asked, partial(names_of, flat), layout=layout, holders=ALONE)
        norms = left_norms(backend, layout, made.norm, arrays, flat.leaves)
        made.scaled(backend, Into(arrays))
        return backend.leave_all(arrays.sources, flat.leaves), _arranged(backend, flat, norms)


def _arranged(backend: Backend, flat: FlatTree, norms: Sequence[Any]) -> Any:
    """Return the tree of norms; that of a leaf that does not count is a scalar 0."""
    with backend.precision():
        zero = backend.leave_scalar(backend.zeros((), ()), "float32", flat.leaves) if flat.others else None
    return flat.arrange(norms, zero)
