"""The driver of functional calls: measure or clip the leaves of a tree, for any layout and framework.

Without a derivative, one pass clips all leaves in host memory. Where a derivative may be asked for, or values are not
known, groups of leaves whose norms can share a vector are clipped together, and the others one by one.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import optree

from gradclip.arguments import check_threshold, check_thresholds, scalar_array, warn_of_parameters
from gradclip.arithmetic import ordinary_arithmetic
from gradclip.backends.registry import find
from gradclip.core.arrays import Arrays
from gradclip.core.decision import Clipping
from gradclip.core.holders import ALONE, Holders
from gradclip.core.layouts import Groups, Layout, Rows
from gradclip.core.nonfinite import PROPAGATE
from gradclip.core.norms import Norm, Order
from gradclip.core.pipeline import decide, measure_all
from gradclip.core.protocols import Backend, ConcreteBackend, is_concrete
from gradclip.core.records import Into
from gradclip.core.rules import CLIP
from gradclip.core.scopes import LAYER, Scope
from gradclip.core.several import Each, Following, left_norms
from gradclip.core.units import Adaptive
from gradclip.differentiable import Batch, batches_of, shared_threshold
from gradclip.distributed.mesh_axes import holders_of, over_axes
from gradclip.fast_path import Ordinary, known_thresholds, read
from gradclip.leaves import counted
from gradclip.tree import FlatTree, flattened
from gradclip.typing import AxisName
from gradclip.unit_axes import check_shapes, names_of, with_parameters


class Leaves(NamedTuple):
    """The leaves of a tree; if the kernels read all of them as they are, also as described to the kernels."""

    flat: FlatTree
    known: Ordinary | None = None


def leaves_of(tree: object, axis_name: AxisName = None) -> Leaves:
    """Return the leaves of a tree. Raises TypeError if all its numbers are integers."""
    if axis_name is None:
        leaves, structure = optree.tree_flatten(tree)
        known = read(leaves)
        if known is not None:
            return Leaves(flattened(leaves, structure), known)
    return Leaves(counted(tree))


@ordinary_arithmetic
def clip_groups(
    leaves: Leaves, layers: Groups, max_norms: Sequence[Any], clipping: Clipping, axis_name: AxisName = None
) -> tuple[list[Any], list[Any]]:
    """Clip the leaves of each group by their common norm; return all leaves in order, and the norms."""
    flat, known = leaves
    thresholds = None if known is None else known_thresholds(max_norms)
    if known is not None and thresholds is not None:
        with known.backend.precision():
            return _clip_in_one_pass(known.backend, ALONE, known.arrays(), flat, layers, thresholds, clipping)
    warn_of_parameters(flat.leaves)
    backend, holders = backend_and_holders(flat, axis_name, *max_norms)
    thresholds, given = check_thresholds(max_norms, backend), _scalar_arrays(max_norms)
    if _in_one_pass(backend, flat.leaves, given):
        with backend.precision():
            arrays = backend.take(flat.leaves)
            return _clip_in_one_pass(backend, holders, arrays, flat, layers, thresholds, clipping)
    return _clip_in_batches(backend, holders, flat, layers.groups, (thresholds, given), clipping)


def _clip_in_batches(
    backend: Backend,
    holders: Holders,
    flat: FlatTree,
    groups: Sequence[Sequence[int]],
    thresholds: tuple[Sequence[Any], Sequence[Any]],
    clipping: Clipping,
) -> tuple[list[Any], list[Any]]:
    """Clip groups that can share a vector of norms in one call; `thresholds` are the checked ones, and the arrays."""
    clipped: list[Any] = list(flat.leaves)
    norms: list[Any] = [None] * len(groups)
    outline = flat.outline(backend.types_of(flat.leaves))
    for numbers in batches_of(backend, flat.leaves, groups, thresholds[0]):
        known, traced = shared_threshold(backend, *([each[n] for n in numbers] for each in thresholds))
        mine = replace(clipping, max_norm=known)
        batch = Batch.of(backend, holders, [groups[n] for n in numbers], mine, outline)
        results, found = batch.run(flat.leaves, traced)
        for place, result in zip(batch.indices, results, strict=True):
            clipped[place] = result
        for number, norm in zip(numbers, found, strict=True):
            norms[number] = norm
    return clipped, norms


def norms_of_groups(leaves: Leaves, layers: Groups, order: Order, axis_name: AxisName = None) -> list[Any]:
    """Return the norm of each group of leaves."""
    flat, known = leaves
    if known is not None:
        with known.backend.precision():
            return _norms_in_one_pass(known.backend, ALONE, known.arrays(), flat, layers, order)
    warn_of_parameters(flat.leaves)
    backend, holders = backend_and_holders(flat, axis_name)
    if _in_one_pass(backend, flat.leaves):
        with backend.precision():
            return _norms_in_one_pass(backend, holders, backend.take(flat.leaves), flat, layers, order)
    norms: list[Any] = [None] * layers.count
    groups = layers.groups
    outline = flat.outline(backend.types_of(flat.leaves))
    clipping = Clipping(math.inf, order, PROPAGATE, CLIP)
    for numbers in batches_of(backend, flat.leaves, groups, [math.inf] * len(groups)):
        batch = Batch.of(backend, holders, [groups[n] for n in numbers], clipping, outline)
        for number, norm in zip(numbers, batch.run(flat.leaves, None, with_leaves=False)[1], strict=True):
            norms[number] = norm
    return norms


def clip_units(
    flat: FlatTree, max_norms: Sequence[Any], clipping: Clipping, scopes: Sequence[Scope]
) -> tuple[list[Any], Any]:
    """Clip the units of each leaf to its threshold; return the leaves and a tree of the norms of their units."""
    warn_of_parameters(flat.leaves)
    backend = find(flat.leaves, flat.paths, *max_norms)
    thresholds, given = check_thresholds(max_norms, backend), _scalar_arrays(max_norms)
    if _in_one_pass(backend, flat.leaves, given):
        return _clip_units_in_one_pass(backend, flat, Each(thresholds), clipping, scopes)
    outline, leaves, norms = flat.outline(backend.types_of(flat.leaves)), [], []
    for index, (scope, threshold) in enumerate(zip(scopes, thresholds, strict=True)):
        asked = replace(clipping, max_norm=threshold if isinstance(threshold, float) else None)
        batch = Batch.of(backend, ALONE, [[index]], asked, outline, scope)
        (leaf,), (norm,) = batch.run(flat.leaves, given[index])
        leaves.append(leaf)
        norms.append(norm)
    return leaves, _arranged(backend, flat, norms)


def clip_units_adaptively(
    flat: FlatTree, params: Sequence[Any], both: tuple[Any, Any], clipping: Clipping, scopes: Sequence[Scope]
) -> tuple[list[Any], Any]:
    """Clip the units of each leaf likewise, to thresholds from its parameter; `both` are `clipping` and `eps`."""
    warn_of_parameters(flat.leaves)
    check_shapes(flat.leaves, params, partial(names_of, flat))
    backend = find([*flat.leaves, *params], lambda: with_parameters(names_of(flat)), *both)
    adaptive, given = adaptive_of(backend, *both)
    if _in_one_pass(backend, [*flat.leaves, *params], given):
        with backend.precision():
            following = Following(Adaptive(adaptive.known), backend.take(params))
        return _clip_units_in_one_pass(backend, flat, following, clipping, scopes)
    outline, leaves, norms = flat.outline(backend.types_of(flat.leaves)), [], []
    asked = replace(clipping, max_norm=math.inf)
    for index, (scope, param) in enumerate(zip(scopes, params, strict=True)):
        batch = Batch.of(backend, ALONE, [[index]], asked, outline, scope, adaptive)
        (leaf,), (norm,) = batch.run(flat.leaves, None, beside=[param, *given])
        leaves.append(leaf)
        norms.append(norm)
    return leaves, _arranged(backend, flat, norms)


def adaptive_of(backend: Backend, clipping: object, eps: object) -> tuple[Adaptive, list[Any]]:
    """Return the rule for adaptive thresholds, and those of `clipping` and `eps` that are arrays."""
    known = check_threshold(clipping, "clipping", backend=backend), check_threshold(eps, "eps", backend=backend)
    first, second = (one if isinstance(one, float) else None for one in known)
    arrays = scalar_array(clipping), scalar_array(eps)
    given = [array for array in arrays if array is not None]
    return Adaptive((first, second), (arrays[0] is not None, arrays[1] is not None)), given


def backend_and_holders(flat: FlatTree, axis_name: AxisName, *scalars: object) -> tuple[Backend, Holders]:
    """Return the backend of a tree and its thresholds, over the mesh axes if any are named, and its holders."""
    backend = find(flat.leaves, flat.paths, *scalars)
    return (backend, holders_of(backend)) if axis_name is None or not flat.leaves else over_axes(backend, axis_name)


def layers_of(flat: FlatTree) -> tuple[FlatTree, Groups]:
    """Return all leaves of the tree, and for each a group with its index, empty for a leaf that does not count."""
    if not flat.others:
        return flat, Groups.each_alone(len(flat.leaves))
    every, groups = flat.each_alone()
    return every, Groups(groups)


def split_by(flat: FlatTree, prefix: object, what: str = "the thresholds") -> tuple[FlatTree, Groups]:
    """Return the leaves of the prefix, and for each a group with the indices of the leaves below it."""
    every, groups = flat.split_by(prefix, what)
    alone = every.structure == flat.structure and not flat.others
    return every, Groups.each_alone(len(groups)) if alone else Groups(groups)


def _scalar_arrays(max_norms: Sequence[Any]) -> list[Any]:
    """Return the thresholds that are scalar arrays, with None in place of numbers."""
    if max_norms and all(one is max_norms[0] for one in max_norms):
        return [scalar_array(max_norms[0])] * len(max_norms)
    return list(map(scalar_array, max_norms))


def _in_one_pass(backend: Backend, leaves: Sequence[Any], given: Sequence[Any] = ()) -> TypeGuard[ConcreteBackend]:
    """Return whether all values are known and no derivative is asked for."""
    return is_concrete(backend) and backend.plain([*leaves, *{id(x): x for x in given if x is not None}.values()])


def _layout(layers: Groups) -> Layout:
    return LAYER if layers.count == 1 else layers


def _clip_in_one_pass(
    backend: ConcreteBackend,
    holders: Holders,
    arrays: Arrays,
    flat: FlatTree,
    layers: Groups,
    thresholds: Sequence[Any],
    clipping: Clipping,
) -> tuple[list[Any], list[Any]]:
    layout = _layout(layers)
    asked = replace(clipping, max_norm=thresholds[0] if layout is LAYER else Each(thresholds))
    made = decide(backend, arrays, asked, partial(names_of, flat), layout=layout, holders=holders)
    norms = _left(backend, holders, layout, made.norm, arrays, flat.leaves)
    return backend.leave_all(made.scaled(backend), flat.leaves), norms


def _norms_in_one_pass(
    backend: ConcreteBackend, holders: Holders, arrays: Arrays, flat: FlatTree, layers: Groups, order: Order
) -> list[Any]:
    layout = _layout(layers)
    norm = measure_all(backend, arrays, layout, order, holders)
    return _left(backend, holders, layout, norm, arrays, flat.leaves)


def _clip_units_in_one_pass(
    backend: ConcreteBackend, flat: FlatTree, thresholds: Each | Following, clipping: Clipping, scopes: Sequence[Scope]
) -> tuple[list[Any], Any]:
    asked = replace(clipping, max_norm=thresholds)
    with backend.precision():
        # The kernels scale units only in place.
        arrays = backend.copied(backend.take(flat.leaves))
        layout = Rows(scopes, [tuple(x.shape) for x in arrays.sources])
        made = decide(backend, arrays, asked, partial(names_of, flat), layout=layout, holders=ALONE)
        norms = left_norms(backend, layout, made.norm, arrays, flat.leaves)
        made.scaled(backend, Into(arrays))
        return backend.leave_all(arrays.sources, flat.leaves), _arranged(backend, flat, norms)


def _left(
    backend: Backend, holders: Holders, layout: Layout, norm: Norm, arrays: Arrays, leaves: Sequence[Any]
) -> list[Any]:
    """Return the norms as scalars of the framework."""
    if isinstance(layout, Scope):
        return [backend.leave_scalar(norm.product(), holders.norm_dtype(arrays), leaves)]
    return left_norms(backend, layout, norm, arrays, leaves)


def _arranged(backend: Backend, flat: FlatTree, norms: Sequence[Any]) -> Any:
    """Return the tree of norms; that of a leaf that does not count is a scalar 0."""
    with backend.precision():
        zero = backend.leave_scalar(backend.zeros((), ()), "float32", flat.leaves) if flat.others else None
    return flat.arrange(norms, zero)
