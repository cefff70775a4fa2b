"""Clip each gradient of parameters, or each layer of a tree of NumPy arrays, in place by its own norm."""

from __future__ import annotations

from typing import Any

from gradclip.arithmetic import ordinary_arithmetic
from gradclip.backends import any_distributed
from gradclip.core.decision import Clipping
from gradclip.core.nonfinite import Nonfinite
from gradclip.core.norms import Order
from gradclip.core.rules import CLIP
from gradclip.core.several import Each
from gradclip.distributed.processes import ONE_PROCESS
from gradclip.fast_path import reusable
from gradclip.inplace.gradients import entered
from gradclip.inplace.layerwise import Layerwise
from gradclip.inplace.parts import clip_parts
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
    params = ParameterList.of(reusable(parameters))
    if any_distributed(params.parameters) or any_distributed(params.gradients):
        raise ValueError(
            "clip_grad_layer_norm_ does not support distributed tensors. Call gradclip.clip_grad_norm_, once for all "
            "parameters or once for each."
        )
    gradients, backend, arrays = entered(params, ONE_PROCESS, *flatten(max_norm).leaves, to_write=True, apart=True)
    layers = Layerwise.of(params, max_norm, backend, gradients)
    layout, thresholds = layers.groups, Each(layers.thresholds)
    with backend.precision():
        return layers.arranged(clip_parts(gradients, backend, arrays, layout, thresholds, clipping))
