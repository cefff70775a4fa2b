"""Measure and clip groups of leaves, each with one norm; many groups with one call if the backend supports it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gradclip.arguments import check_threshold, scalar_array, warn_of_parameters
from gradclip.arithmetic import ordinary_arithmetic
from gradclip.backends.host.protocol import in_host_memory
from gradclip.backends.registry import find
from gradclip.core.decide import Clipping, decide
from gradclip.core.derivative import ClipRule
from gradclip.core.holders import Holders
from gradclip.core.nonfinite import PROPAGATE
from gradclip.core.norms import Order
from gradclip.core.protocols import Backend
from gradclip.core.rules import CLIP
from gradclip.core.scopes import LAYER, TREE
from gradclip.core.values import Array
from gradclip.distributed.mesh_axes import holders_of, over_axes
from gradclip.layers import at_once, traced
from gradclip.tree import FlatTree
from gradclip.typing import AxisName


def norm_of(backend: Backend, holders: Holders, leaves: Sequence[Any], order: Order) -> Any:
    """Return the norm of the leaves together, as a scalar of their framework."""
    rule = ClipRule(order, math.inf, PROPAGATE, CLIP, TREE)
    patterns = backend.patterns(leaves)

    def primal(prepared: Sequence[Any], _max_norm: None, _mask: None) -> tuple[list[Any], Any, list[Any]]:
        with backend.precision():
            arrays = backend.enter(prepared)
            norm = holders.measure(backend, arrays, order)
            return [], backend.leave_scalar(norm.product(), holders.norm_dtype(arrays), patterns), []

    return backend.differentiable(primal, rule)(list(map(backend.prepare, leaves)), None, None)[1]


@ordinary_arithmetic
def clip_groups(
    flat: FlatTree,
    groups: Sequence[Sequence[int]],
    max_norms: Sequence[Any],
    clipping: Clipping,
    axis_name: AxisName = None,
) -> tuple[list[Any], list[Any]]:
    """Clip the leaves of each group by their common norm; return all leaves in order, and the norms."""
    warn_of_parameters(flat.leaves)
    backend, holders = backend_and_holders(flat, axis_name, *max_norms)
    thresholds, given = _checked(max_norms, backend)
    clipped = list(flat.leaves)
    outline = flat.outline(backend.patterns(flat.leaves))
    only_numbers = all(array is None for array in given)
    norms = _clip_at_once(backend, flat, groups, thresholds, clipping, clipped) if only_numbers else {}
    made, found = traced.clipped(backend, holders, flat.leaves, groups, thresholds, clipping)
    if not (clipping.nonfinite.raises and found and _any_nonfinite(backend, list(found.values()))):
        norms.update(found)
        for i, result in made.items():
            clipped[i] = result
    for number, group in enumerate(groups):
        if number in norms:
            continue
        mine = replace(clipping, max_norm=thresholds[number])
        leaves = [flat.leaves[i] for i in group]
        together = partial(_names, outline, group)
        results, norms[number] = _clip_together(backend, holders, leaves, given[number], mine, together)
        for i, result in zip(group, results, strict=True):
            clipped[i] = result
    return clipped, [norms[number] for number in range(len(groups))]


def _checked(max_norms: Sequence[Any], backend: Backend) -> tuple[list[Any], list[Any]]:
    """Return the checked thresholds, and those given as scalar arrays, with None in place of numbers."""
    first = max_norms[0] if max_norms else None
    if max_norms and all(one is first for one in max_norms):  # one threshold for all layers, possibly many
        return [check_threshold(first, backend=backend)] * len(max_norms), [scalar_array(first)] * len(max_norms)
    return [check_threshold(one, backend=backend) for one in max_norms], list(map(scalar_array, max_norms))


def _any_nonfinite(backend: Backend, norms: Sequence[Any]) -> bool:
    """Return whether a norm, or the sum of the norms, is non-finite; if so, the caller checks each norm."""
    with backend.precision():
        total = backend.total([backend.scalar(norm, ()) for norm in norms])
        return not backend.xp.isfinite(total)


def _clip_at_once(
    backend: Backend,
    flat: FlatTree,
    groups: Sequence[Sequence[int]],
    thresholds: Sequence[Any],
    clipping: Clipping,
    clipped: list[Any],
) -> dict[int, Any]:
    """Put the leaves of the groups that one call can clip into `clipped`; return the norms of these groups."""
    if not clipping.target.keeps:
        return {}
    with backend.precision():
        known = measured_at_once(backend, flat, groups, clipping.order)
        made = known and known.clipped(thresholds)
        if not made:
            return {}
        known, results = made
        for index, result in known.results(results, flat.leaves).items():
            clipped[index] = result
        return known.norms(flat.leaves)


def measured_at_once(
    backend: Backend, flat: FlatTree, groups: Sequence[Sequence[int]], order: Order
) -> at_once.Layers | None:
    """Measure many groups of leaves with one call; return None if that is impossible."""
    if len(groups) < 2 or not in_host_memory(backend) or not backend.plain(flat.leaves):
        return None
    return at_once.measured(backend, flat.leaves, groups, order)


def backend_and_holders(flat: FlatTree, axis_name: AxisName, *scalars: object) -> tuple[Backend, Holders]:
    """Return the backend of a tree and its thresholds, over the mesh axes if any are named, and its holders."""
    backend = find(flat.leaves, flat.paths, *scalars)
    return (backend, holders_of(backend)) if axis_name is None or not flat.leaves else over_axes(backend, axis_name)


def _names(flat: FlatTree, group: Sequence[int]) -> list[str]:
    paths = flat.paths()
    return [paths[i] or "the gradient" for i in group]


def _clip_together(
    backend: Backend,
    holders: Holders,
    leaves: Sequence[Any],
    given: Array | None,
    clipping: Clipping,
    names: Callable[[], Sequence[str]],
) -> tuple[list[Any], Any]:
    """Clip leaves by their common norm; `given` is the threshold if it is a scalar array."""
    known = isinstance(clipping.max_norm, float)
    # JAX keeps the values these functions capture, so none may be a traced array.
    clipping = clipping if known else replace(clipping, max_norm=None)
    patterns = backend.patterns(leaves)

    def primal(prepared: Sequence[Any], max_norm: Array | None, _: None) -> tuple[list[Any], Any, list[Any]]:
        with backend.precision():
            arrays = backend.enter(prepared)
            asked = clipping if known else replace(clipping, max_norm=max_norm)
            made = decide(backend, arrays, asked, names, holders=holders)
            shrunk = made.coefficient.scaled(backend, made.arrays)
            norm = backend.leave_scalar(made.norm.product(), holders.norm_dtype(arrays), patterns)
            return backend.leave_all(shrunk, patterns), norm, []

    rule = ClipRule(clipping.order, clipping.max_norm, clipping.nonfinite, clipping.target, LAYER)
    clip = backend.differentiable(primal, rule)
    return clip(list(map(backend.prepare, leaves)), given, None)[:2]
