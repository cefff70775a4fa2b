"""Clip gradients in place where they have several norms: each group of them, or each unit."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gradclip.core.arrays import Arrays
from gradclip.core.decision import Clipping
from gradclip.core.layouts import Groups, Several
from gradclip.core.pipeline import decide
from gradclip.core.protocols import Backend
from gradclip.core.records import OneFactor
from gradclip.core.several import Each, Following, left_norms
from gradclip.distributed.mesh_axes import holders_of
from gradclip.inplace.gradients import Gradients


def clip_parts(
    gradients: Gradients,
    backend: Backend,
    arrays: Arrays,
    layout: Several,
    thresholds: Each | Following,
    clipping: Clipping,
) -> list[Any]:
    """Measure the gradients, which are `arrays`, then scale them; return the norms of each part."""
    if backend.concrete:
        asked, holders = replace(clipping, max_norm=thresholds), holders_of(backend)
        made = decide(backend, arrays, asked, gradients.names, layout=layout, holders=holders)
        norms = left_norms(backend, layout, made.norm, arrays, gradients.grads)
        gradients.scale(backend, arrays, made)
        return norms
    if isinstance(layout, Groups) and isinstance(thresholds, Each):
        found = _clip_with_few_operations(gradients, backend, arrays, layout, thresholds, clipping)
        if found is not None:
            return found
    return _clip_one_by_one(gradients, backend, arrays, layout, thresholds, clipping)


def _clip_one_by_one(
    gradients: Gradients,
    backend: Backend,
    arrays: Arrays,
    layout: Several,
    thresholds: Each | Following,
    clipping: Clipping,
) -> list[Any]:
    holders = holders_of(backend)
    made, norms = [], []
    for number, (indices, scope) in enumerate(layout.parts):
        mine, part = gradients.chosen(indices), backend.chosen(arrays, indices)
        asked = replace(clipping, max_norm=thresholds.of_part(backend, layout, number, clipping.order))
        decision = decide(backend, part, asked, mine.names, layout=scope, holders=holders)
        made.append((mine, part, decision))
        norms.append(backend.leave_scalar(decision.norm.product(), holders.norm_dtype(part), mine.grads))
    for mine, part, decision in made:
        mine.scale(backend, part, decision)
    return norms


def _clip_with_few_operations(
    gradients: Gradients, backend: Backend, arrays: Arrays, layout: Groups, thresholds: Each, clipping: Clipping
) -> list[Any] | None:
    """Clip all groups together; return None, with nothing changed, if that is not possible."""
    if layout.count < 2 or backend.multi_tensor(arrays) is None:
        return None
    clipping = gradients.cleared(backend, arrays, clipping)
    indices = [index for group in layout.groups for index in group]
    mine, flat = gradients.chosen(indices), backend.chosen(arrays, indices)
    consecutive = Groups.consecutive(layout.groups)
    asked = replace(clipping, max_norm=_together(backend, thresholds.values))
    made = decide(backend, flat, asked, mine.names, layout=consecutive, holders=holders_of(backend))
    if not isinstance(made.coefficient, OneFactor):
        return None
    norms = left_norms(backend, consecutive, made.norm, flat, mine.grads)
    mine.scale(backend, flat, made)
    return norms


def _together(backend: Backend, thresholds: Sequence[Any]) -> Any:
    """Return the thresholds as one number if all are equal, else as a vector."""
    if not all(isinstance(threshold, float) for threshold in thresholds):
        return backend.stacked([backend.scalar(threshold, ()) for threshold in thresholds])
    return thresholds[0] if len(set(thresholds)) == 1 else np.array(thresholds)
