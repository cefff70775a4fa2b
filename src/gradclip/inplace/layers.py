"""Clip each gradient of parameters, or each layer of a tree of NumPy arrays, in place by its own norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gradclip.arithmetic import ordinary_arithmetic
from gradclip.backends import any_distributed
from gradclip.core.arrays import Arrays
from gradclip.core.decide import Clipping, decide, decide_each
from gradclip.core.nonfinite import Nonfinite
from gradclip.core.norms import Order, norm_dtype
from gradclip.core.protocols import Backend
from gradclip.core.records import Multiplier
from gradclip.core.rules import CLIP
from gradclip.distributed.mesh_axes import holders_of
from gradclip.distributed.processes import ONE_PROCESS
from gradclip.fast_path import reusable
from gradclip.inplace.gradients import Gradients, entered
from gradclip.inplace.layerwise import Layerwise
from gradclip.layers import fast_path
from gradclip.parameters import ParameterList
from gradclip.tree import flatten
from gradclip.typing import Ord, Parameters, Policy, Thresholds


@ordinary_arithmetic
def clip_grad_layer_norm_(
    parameters: Parameters, max_norm: Thresholds, ord: Ord = 2, *, nonfinite: Policy = "propagate"
) -> Any:
    """Scale each gradient of `parameters` in place by min(1, max_norm / its own norm).

    Args:
        parameters: as in `clip_grad_norm_`, but no distributed tensors. If gradients share memory, all but one get
            memory of their own, because each is scaled by its own number. Arrays of a tree cannot be replaced, so only
            those below one threshold of a prefix may share memory.
        max_norm: the threshold of each gradient, >= 0: a number, or a list with one threshold per parameter. For a tree
            of NumPy arrays, a number or a prefix of the tree, as in `gradclip.clip_by_layer_norm`.
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: what to do if a gradient contains NaN or infinity, as in `gradclip.clip_by_global_norm`.

    Returns:
        The norms before clipping: a list with one norm per parameter, None for a parameter without a gradient. For a
        tree of NumPy arrays, a tree of norms with the structure of the tree, or of `max_norm` if that is a prefix.

    Raises:
        ValueError: a tensor is distributed, `max_norm` is a list of the wrong length, or arrays of a tree share memory
            but not a threshold. Other errors are those of `clip_grad_norm_`.

    After an error, the gradients are unchanged.

    >>> import numpy as np
    >>> update = {"w": np.array([3.0, 4.0]), "b": np.array([0.5])}
    >>> norms = clip_grad_layer_norm_(update, max_norm=1.0)
    >>> float(norms["w"]), update["w"].round(6).tolist(), update["b"].tolist()
    (5.0, [0.6, 0.8], [0.5])

    """
    clipping = Clipping(None, Order.parse(ord), Nonfinite.named(nonfinite), CLIP)
    parameters = reusable(parameters)
    found = fast_path.clip_grad_layer_norm_(parameters, max_norm, clipping.order)
    if found is not None:
        return found
    params = ParameterList.of(parameters)
    if any_distributed(params.parameters) or any_distributed(params.gradients):
        raise ValueError(
            "clip_grad_layer_norm_ does not support distributed tensors. Call gradclip.clip_grad_norm_, once for all "
            "parameters or once for each."
        )
    gradients, backend, arrays = entered(params, ONE_PROCESS, *flatten(max_norm).leaves, to_write=True, apart=True)
    layers = Layerwise.of(params, max_norm, backend)
    groups = layers.among(gradients)
    with backend.precision():
        norms = _clip_at_once(backend, gradients, arrays, groups, layers.thresholds, clipping)
        if norms is None:
            norms = _clip_each(backend, gradients, arrays, groups, layers.thresholds, clipping)
    return layers.arranged(norms)


def _clip_each(
    backend: Backend,
    gradients: Gradients,
    arrays: Arrays,
    groups: Sequence[Sequence[int]],
    thresholds: Sequence[Any],
    clipping: Clipping,
) -> list[Any]:
    """Measure all groups, then clip each by its own norm; return the norms."""
    holders = holders_of(backend)
    made, norms = [], []
    for group, threshold in zip(groups, thresholds, strict=True):
        mine, of_group = gradients.chosen(group), backend.chosen(arrays, group)
        decision = decide(backend, of_group, replace(clipping, max_norm=threshold), mine.names, holders=holders)
        made.append((mine, of_group, decision))
        norms.append(backend.leave_scalar(decision.norm.product(), holders.norm_dtype(of_group), mine.grads))
    for mine, of_group, decision in made:
        mine.scale(backend, of_group, decision.arrays, decision.coefficient)
    return norms


def _clip_at_once(
    backend: Backend,
    gradients: Gradients,
    arrays: Arrays,
    groups: Sequence[Sequence[int]],
    thresholds: Sequence[Any],
    clipping: Clipping,
) -> list[Any] | None:
    """Do the same with a few operations for all groups; return None, with nothing changed, if that is not possible."""
    if backend.concrete or len(groups) < 2 or backend.at_once(arrays) is None:
        return None
    clipping = gradients.cleared(backend, arrays, clipping)
    indices = [index for group in groups for index in group]
    mine, flat = gradients.chosen(indices), backend.chosen(arrays, indices)
    of_groups = [backend.chosen(arrays, group) for group in groups]
    asked = replace(clipping, max_norm=_together(backend, thresholds))
    norm, coefficient, new = decide_each(backend, of_groups, asked, holders_of(backend))
    finite = not clipping.nonfinite.raises or backend.xp.all(backend.xp.isfinite(norm.value))
    if not isinstance(coefficient, Multiplier) or not finite:
        return None
    dtypes = list(map(norm_dtype, of_groups))
    product, norms = norm.product(), {}
    for dtype in dict.fromkeys(dtypes):
        norms[dtype] = backend.unstacked([backend.leave_scalar(product, dtype, mine.grads)])[0]
    mine.scale(backend, flat, Arrays(new) if clipping.nonfinite.zeroes else flat, coefficient)
    return [norms[dtype][number] for number, dtype in enumerate(dtypes)]


def _together(backend: Backend, thresholds: Sequence[Any]) -> Any:
    """Return the thresholds as one number if all are equal, else as a vector."""
    if not all(isinstance(threshold, float) for threshold in thresholds):
        return backend.stacked([backend.scalar(threshold, ()) for threshold in thresholds])
    return thresholds[0] if len(set(thresholds)) == 1 else np.array(thresholds)
