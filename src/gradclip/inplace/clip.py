"""Clipping in place: the gradients of parameters, objects that carry one in `.grad`, or a tree of NumPy arrays.

Everything is checked and decided before the first element is written. Memory that several gradients share counts,
and is scaled, once. Where several processes hold parts of the gradients, each calls with its own, and all
get the same norm.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gradclip.adaptive.holder import AdaptiveNorm
from gradclip.arguments import check_norm, check_real, check_threshold
from gradclip.arithmetic import ordinary_arithmetic
from gradclip.backends import whole_scalar
from gradclip.core import fast_path
from gradclip.core.decide import Clipping, decide, from_norm
from gradclip.core.nonfinite import PROPAGATE, Nonfinite
from gradclip.core.norms import Order
from gradclip.core.rules import CLIP
from gradclip.distributed.processes import ONE_PROCESS, processes_of
from gradclip.inplace.gradients import entered
from gradclip.parameters import ParameterList
from gradclip.typing import Meshes, Ord, Parameters, Policy, ProcessGroups, Scalar, Threshold

if TYPE_CHECKING:
    from gradclip.monitor.monitor import Monitor


@ordinary_arithmetic
def grad_norm(
    parameters: Parameters, ord: Ord | Order = 2, *, process_group: ProcessGroups = None, mesh: Meshes = None
) -> Scalar:
    """Return the norm of the gradients of `parameters` together, without changing them.

    Args:
        parameters: an iterable of objects with a `.grad`, or one such object; or a tree of NumPy arrays, the gradients
            themselves. A `.grad` of None is skipped. Views of the same elements, as W and W.T, count once.
        ord: which norm, as in `gradclip.global_norm`.
        process_group: the processes of which each holds other gradients, as in `clip_grad_norm_`.
        mesh: the same as a mesh.

    Returns:
        A scalar of the gradients' framework on the first one's device: float64 if one is float64, else float32.

    Raises:
        TypeError: something without `.grad`. ValueError: gradients instead of parameters, an exhausted generator,
        gradients that share only some of their elements.

    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> layer = SimpleNamespace(grad=np.array([3.0, 4.0]))
    >>> float(grad_norm([layer]))
    5.0

    """
    if process_group is None and mesh is None:
        parameters = fast_path.reusable(parameters)
        found = fast_path.grad_norm(parameters, ord)
        if found is not None:
            return found
    params = _parameters(parameters, process_group, mesh)
    processes = processes_of(params, process_group, mesh)
    with processes.preparing():
        order = Order.parse(ord)
        processes.ask(order, PROPAGATE)
        gradients, backend, arrays = entered(params, processes)
    holders = processes.holders(backend)
    with backend.precision():
        norm = holders.measure(backend, arrays, order)
        return backend.leave_scalar(norm.product(), holders.norm_dtype(arrays), gradients.grads)


@ordinary_arithmetic
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: Threshold | AdaptiveNorm,
    ord: Ord | Order = 2,
    *,
    nonfinite: Policy = "propagate",
    process_group: ProcessGroups = None,
    mesh: Meshes = None,
    monitor: Monitor | None = None,
) -> Scalar:
    """Scale the gradients of `parameters` in place by min(1, max_norm / norm); their norm is then at most `max_norm`.

    Args:
        parameters: as in `grad_norm`. The gradients are written where they lie; one that cannot be written (a JAX
            array, a read-only or expanded one) is replaced in its `.grad`. NumPy arrays passed themselves must be
            writable. Memory that is listed twice is scaled once.
        max_norm: the threshold, >= 0, in the units of the gradients; `inf` clips nothing. A `gradclip.AdaptiveNorm`
            is a threshold that follows the norms of these calls.
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: "propagate", "raise", "zero" or "skip", as in `gradclip.clip_by_global_norm`.
        process_group: processes of which each holds other gradients, or other parts of them, and calls: a process
            group of PyTorch, or a list; an empty list says that this process is alone. Distributed tensors say
            themselves how they are split, gradients of DistributedDataParallel are not split. A parameter group
            (`{"params": [...], "process_group": ...}`) may name its own.
        mesh: the same as a mesh of PyTorch, for the processes along all of its dimensions.
        monitor: what records the norm and the threshold of this call, once it has succeeded.

    Returns:
        The norm before clipping, as `grad_norm` returns it.

    Raises:
        TypeError: something without `.grad`, a gradient of integers, what is no process group. ValueError: a negative
        or NaN `max_norm`, an unknown `ord` or policy, gradients instead of parameters, an exhausted generator, a
        read-only array that nothing holds, gradients that share only some of their elements; where several processes
        call, other arguments on some of them, a group without this process, shards of FSDP1 with no group named,
        gradients that all of a group hold alike. RuntimeError: an error on another process, or one that has ended.
        FloatingPointError: under "raise". In every case the gradients are as they were.

    Nothing is written where the norm is at most `max_norm`. On an accelerator the call waits for nothing, unless
    `nonfinite="raise"`, and so always writes.

    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> layer = SimpleNamespace(grad=np.array([3.0, 4.0]))
    >>> float(clip_grad_norm_([layer], max_norm=1.0)), layer.grad.round(6).tolist()
    (5.0, [0.6, 0.8])
    >>> update = {"w": np.array([3.0, 4.0]), "b": np.array([12.0])}
    >>> float(clip_grad_norm_(update, max_norm=6.5)), update["b"].round(6).tolist()
    (13.0, [6.0])

    """
    if monitor is not None:
        from gradclip.inplace.watched import clip_watched  # most calls do without

        clip = partial(
            clip_grad_norm_, max_norm=max_norm, ord=ord, nonfinite=nonfinite, process_group=process_group, mesh=mesh
        )
        alone = process_group is None and mesh is None
        return clip_watched(clip, parameters, max_norm, ord, nonfinite, monitor, alone=alone)
    if process_group is None and mesh is None:
        parameters = fast_path.reusable(parameters)
        found = fast_path.clip_grad_norm_(parameters, max_norm, ord, nonfinite)
        if found is not None:
            return found
    if isinstance(max_norm, AdaptiveNorm):
        return _clip_by_holder(fast_path.reusable(parameters), max_norm, ord, nonfinite, process_group, mesh)
    params = _parameters(parameters, process_group, mesh)
    processes = processes_of(params, process_group, mesh)
    with processes.preparing():
        order, policy, threshold = Order.parse(ord), Nonfinite.named(nonfinite), whole_scalar(max_norm)
        processes.ask(order, policy, threshold)
        gradients, backend, arrays = entered(params, processes, threshold, to_write=True)
        clipping = Clipping(check_threshold(threshold, backend=backend), order, policy, CLIP)
    holders = processes.holders(backend)
    with backend.precision():
        if policy.zeroes and holders.sees_all:
            clipping = gradients.cleared(backend, arrays, clipping)
        made = decide(backend, arrays, clipping, gradients.names, holders=holders)
        norm = backend.leave_scalar(made.norm.product(), holders.norm_dtype(arrays), gradients.grads)
        gradients.scale(backend, arrays, made.arrays, made.coefficient)
    return norm


@ordinary_arithmetic
def clip_grads_with_norm_(parameters: Parameters, max_norm: Threshold, total_norm: Threshold) -> None:
    """Scale the gradients of `parameters` in place by min(1, max_norm / total_norm), for a norm known already.

    Args:
        parameters: as in `clip_grad_norm_`.
        max_norm: the threshold, >= 0.
        total_norm: the norm the gradients count as having, >= 0, of an order from 1: a number or a scalar array,
            trusted to float32 precision. The bound holds if the gradients' norm is no larger. One that is NaN makes all
            NaN, an infinite one makes finite gradients zero, unless `max_norm` is infinite, too.

    Raises:
        TypeError, ValueError: as `clip_grad_norm_`, of `total_norm` too; the gradients are as they were.

    On an accelerator a scalar array is not looked at: there a negative `total_norm` makes all NaN.

    """
    max_norm, total_norm = whole_scalar(max_norm), whole_scalar(total_norm)
    gradients, backend, arrays = entered(ParameterList.of(parameters), ONE_PROCESS, max_norm, total_norm, to_write=True)
    threshold, norm = check_threshold(max_norm, backend=backend), check_norm(total_norm, backend=backend)
    with backend.precision():
        if arrays:
            chosen = from_norm(backend, norm, threshold, arrays)
            gradients.scale(backend, arrays, arrays, chosen)


@ordinary_arithmetic
def clip_grad_value_(parameters: Parameters, clip_value: Threshold) -> None:
    """Clamp each element of the gradients of `parameters` in place to [-clip_value, clip_value]; NaN stays.

    Args:
        parameters: as in `clip_grad_norm_`.
        clip_value: the largest magnitude, >= 0. Where a gradient's dtype cannot hold it, the next number toward zero.

    Raises:
        TypeError: a complex gradient, something without `.grad`. ValueError: a negative or NaN `clip_value`, gradients
        instead of parameters, an exhausted generator. In every case the gradients are as they were.

    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> layer = SimpleNamespace(grad=np.array([-3.0, 0.5]))
    >>> clip_grad_value_(layer, 1.0)
    >>> layer.grad.tolist()
    [-1.0, 0.5]

    """
    clip_value = whole_scalar(clip_value)
    gradients, backend, arrays = entered(ParameterList.of(parameters), ONE_PROCESS, clip_value, to_write=True)
    bound = check_threshold(clip_value, "clip_value", backend=backend)
    with backend.precision():
        check_real(arrays, gradients.names)
        gradients.clamp(backend, arrays, bound)


def _clip_by_holder(
    parameters: Parameters,
    max_norm: AdaptiveNorm,
    ord: Ord | Order,
    nonfinite: Policy,
    process_group: ProcessGroups,
    mesh: Meshes,
) -> Scalar:
    """Clip to the threshold that a holder has for this step. What it refuses reaches the other processes, too."""
    try:
        order, policy = Order.parse(ord), Nonfinite.named(nonfinite)
        max_norm.check_order(order)
    except Exception:
        with processes_of(_parameters(parameters, process_group, mesh), process_group, mesh).preparing():
            raise
    asked = partial(clip_grad_norm_, parameters, ord=ord, nonfinite=nonfinite)
    return max_norm.clip(partial(asked, process_group=process_group, mesh=mesh), order, policy)


def _parameters(parameters: Parameters, process_group: ProcessGroups, mesh: Meshes) -> ParameterList:
    """Return the parameters as a list. An error about them reaches the processes that are named, too."""
    try:
        return ParameterList.of(parameters)
    except Exception:
        if process_group is None and mesh is None:
            raise
        with processes_of(ParameterList(()), process_group, mesh).preparing():
            raise
