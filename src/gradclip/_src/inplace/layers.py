"""Clip in place with several norms: each gradient of parameters, each layer of a tree of NumPy arrays, or each unit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from gradclip._src.core.decision import Clipping
from gradclip._src.core.layouts import Groups
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.core.rules import CLIP
from gradclip._src.core.several import Each
from gradclip._src.inplace.at_once import clip_at_once, numbers
from gradclip._src.inplace.driver import clip_parts
from gradclip._src.inplace.parts import Call, Layerwise
from gradclip._src.passed.arguments import in_place, is_single_threshold
from gradclip._src.passed.parameters import reusable
from gradclip._src.tree import flatten
from gradclip.typing import Integers, Meshes, Ord, Parameters, Policy, ProcessGroups, Thresholds, Where


@in_place
def clip_grad_layer_norm_(
    parameters: Parameters,
    max_norm: Thresholds,
    ord: Ord = 2,
    *,
    nonfinite: Policy = "propagate",
    process_group: ProcessGroups = None,
    mesh: Meshes = None,
    where: Where = None,
    integers: Integers = "keep",
) -> Any:
    """Scale each gradient of `parameters` in place by min(1, max_norm / its own norm).

    Args:
        parameters: as in `clip_grad_norm_`. If gradients share memory, all but one get
            memory of their own, because each is scaled by its own number. Arrays of a tree cannot be replaced, so only
            those below one threshold of a prefix may share memory.
        max_norm: the threshold of each gradient, >= 0: a number, or a list with one threshold per parameter. For a tree
            of NumPy arrays, a number or a prefix of the tree, as in `gradclip.clip_by_layer_norm`.
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: what to do if a gradient contains NaN or infinity, as in `gradclip.clip_by_global_norm`.
        process_group: the processes that each hold a part of every gradient, as in `clip_grad_norm_`. All of them pass
            the same parameters. Leave it out for distributed tensors, and where each process holds whole layers, as
            pipeline stages do.
        mesh: the same, given as a mesh.
        where: which gradients count, as in `clip_grad_norm_`. A list of thresholds has one for each parameter all the
            same.
        integers: "raise" refuses integers, as there.

    Returns:
        The norms before clipping: a list with one norm per parameter, None for a parameter without a gradient, 0
        for one that does not count. For a tree of NumPy arrays, a tree of norms with the structure of the tree, or of
        `max_norm` if that is a prefix. If
        processes hold parts of a gradient, all of them get the norm of the whole.

    Raises:
        ValueError: `max_norm` is a list of the wrong length, or arrays of a tree share memory
            but not a threshold. Other errors are those of `clip_grad_norm_`.

    After an error, the gradients are unchanged.

    >>> import numpy as np
    >>> update = {"w": np.array([3.0, 4.0]), "b": np.array([0.5])}
    >>> norms = clip_grad_layer_norm_(update, max_norm=1.0)
    >>> float(norms["w"]), update["w"].round(6).tolist(), update["b"].tolist()
    (5.0, [0.6, 0.8], [0.5])

    """
    if process_group is None and mesh is None and where is None and integers == "keep":
        parameters = reusable(parameters)
        norms = clip_at_once(parameters, (ord, nonfinite), _layers, partial(numbers, parameters, max_norm))
        if norms is not None:
            return norms
    call = Call.of("clip_grad_layer_norm_", parameters, process_group, mesh, where, integers)
    with call.processes.preparing():
        clipping = Clipping(None, Order.parse(ord), Nonfinite.named(nonfinite), CLIP)
        scalars = [max_norm] if is_single_threshold(max_norm) else flatten(max_norm).leaves
        call.ask(clipping, max_norm=scalars)
        taken = call.taken(*scalars)
        layers = Layerwise.of(call.params, max_norm, taken.backend, taken.gradients)
    with taken.backend.precision():
        holders = call.processes.holders(taken.backend)
        return layers.arranged(clip_parts(taken, layers.groups, Each(layers.thresholds), clipping, holders))


def _layers(leaves: Sequence[Any]) -> Groups:
    return Groups.each_alone(len(leaves))
