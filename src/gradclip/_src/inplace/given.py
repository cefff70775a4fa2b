"""Clip gradients in place by what the caller knows: their norm, or a bound for each element. Nothing is measured."""

from __future__ import annotations

from gradclip._src.backends import whole_scalar
from gradclip._src.core.decision import from_norm
from gradclip._src.distributed.processes import ONE_PROCESS
from gradclip._src.inplace.choice import chosen
from gradclip._src.inplace.gradients import entered
from gradclip._src.passed.arguments import check_norm, check_real, check_threshold, in_place
from gradclip._src.passed.choice import choice_of
from gradclip._src.passed.parameters import ParameterList
from gradclip.typing import Integers, Parameters, Threshold, Where


@in_place
def clip_grads_with_norm_(
    parameters: Parameters,
    max_norm: Threshold,
    total_norm: Threshold,
    *,
    where: Where = None,
    integers: Integers = "keep",
) -> None:
    """Scale the gradients of `parameters` in place by min(1, max_norm / total_norm), for a norm that you already have.

    Args:
        parameters: as in `gradclip.clip_grad_norm_`.
        max_norm: the threshold, >= 0.
        total_norm: the norm of the gradients, >= 0, of any order >= 1: a number or a scalar array, trusted to float32
            precision. The bound holds if the true norm is no larger. If it is NaN, all gradients become NaN. If it is
            infinite, finite gradients become zero, unless `max_norm` is infinite too.
        where: which gradients count, as in `gradclip.clip_grad_norm_`.
        integers: "raise" refuses integers, as there.

    Raises:
        TypeError, ValueError: as in `gradclip.clip_grad_norm_`, also for `total_norm`. The gradients are then
            unchanged.

    On an accelerator the value of a scalar array is not read. There, a negative `total_norm` makes all gradients NaN.

    """
    max_norm, total_norm = whole_scalar(max_norm), whole_scalar(total_norm)
    params = chosen(ParameterList.of(parameters), choice_of(where, integers), alone=True)
    taken = entered(params, ONE_PROCESS, max_norm, total_norm, to_write=True)
    _, backend, arrays = taken
    threshold, norm = check_threshold(max_norm, backend=backend), check_norm(total_norm, backend=backend)
    with backend.precision():
        if arrays:
            taken.scale(from_norm(backend, norm, threshold, arrays))


@in_place
def clip_grad_value_(
    parameters: Parameters, clip_value: Threshold, *, where: Where = None, integers: Integers = "keep"
) -> None:
    """Clamp each element of the gradients of `parameters` in place to [-clip_value, clip_value]. NaN stays NaN.

    Args:
        parameters: as in `gradclip.clip_grad_norm_`.
        clip_value: the largest magnitude, >= 0. If a gradient's dtype cannot represent it, it is rounded toward zero.
        where: which gradients count, as in `gradclip.clip_grad_norm_`.
        integers: "raise" refuses integers, as there.

    Raises:
        TypeError: a gradient is complex, or a parameter has no `.grad`.
        ValueError: `clip_value` is negative or NaN, gradients were passed instead of parameters, or a generator is
            exhausted.

    After an error, the gradients are unchanged.

    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> layer = SimpleNamespace(grad=np.array([-3.0, 0.5]))
    >>> clip_grad_value_(layer, 1.0)
    >>> layer.grad.tolist()
    [-1.0, 0.5]

    """
    clip_value = whole_scalar(clip_value)
    params = chosen(ParameterList.of(parameters), choice_of(where, integers), alone=True)
    taken = entered(params, ONE_PROCESS, clip_value, to_write=True)
    bound = check_threshold(clip_value, "clip_value", backend=taken.backend)
    with taken.backend.precision():
        check_real(taken.arrays, taken.gradients.names)
        taken.clamp(bound)
