"""Clip in place: the gradients of parameters (objects with a `.grad`), or a tree of NumPy arrays.

Everything is checked and decided before the first element is written. Each parameter counts once, whatever memory its
gradient lies in, and memory is scaled once. If several processes hold parts of the gradients, each passes its own part,
and all get the same norm.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from gradclip import fast_path
from gradclip.adaptive.holder import AdaptiveNorm
from gradclip.arguments import check_norm, check_real, check_threshold
from gradclip.arithmetic import ordinary_arithmetic
from gradclip.backends import whole_scalar
from gradclip.core.decision import Clipping, from_norm
from gradclip.core.nonfinite import PROPAGATE, Nonfinite
from gradclip.core.norms import Order
from gradclip.core.pipeline import Seen, decide, seen
from gradclip.core.rules import CLIP
from gradclip.distributed.processes import ONE_PROCESS, processes_of, telling
from gradclip.inplace.gradients import entered
from gradclip.parameters import ParameterList, repeatable
from gradclip.typing import Meshes, Ord, Parameters, Policy, ProcessGroups, Scalar, Threshold

if TYPE_CHECKING:
    from gradclip.monitor.monitor import Monitor


@ordinary_arithmetic
def grad_norm(
    parameters: Parameters, ord: Ord | Order = 2, *, process_group: ProcessGroups = None, mesh: Meshes = None
) -> Scalar:
    """Return the global norm of the gradients of `parameters`, without changing them.

    Args:
        parameters: an iterable of objects with a `.grad`, or one such object; or a tree of NumPy arrays, the gradients
            themselves. A `.grad` of None is skipped. A parameter (in a tree: an array) that is listed twice counts
            once. Different ones count each, even if their gradients share memory.
        ord: which norm, as in `gradclip.global_norm`.
        process_group: the processes that hold different gradients, as in `clip_grad_norm_`.
        mesh: the same, given as a mesh.

    Returns:
        A scalar of the gradients' framework on the first gradient's device: float64 if a gradient is float64, else
        float32.

    Raises:
        TypeError: a parameter has no `.grad`.
        ValueError: gradients were passed instead of parameters, or a generator is exhausted.

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
    """Scale the gradients of `parameters` in place by min(1, max_norm / norm). Their norm is then at most `max_norm`.

    Args:
        parameters: as in `grad_norm`. Gradients are written in place. A gradient that cannot be written (a JAX array, a
            read-only or expanded array) is replaced in its `.grad`. In a tree of NumPy arrays, all must be writable,
            but integers stay as they are and do not count. Memory that several gradients share is scaled once. Compiled
            code finds out which do when it is compiled.
        max_norm: the threshold, >= 0, in the units of the gradients; `inf` clips nothing. Pass a
            `gradclip.AdaptiveNorm` for a threshold that follows the norms of past calls.
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: "propagate", "raise", "zero" or "skip", as in `gradclip.clip_by_global_norm`.
        process_group: a process group of PyTorch, or a list of them, if each of its processes holds different gradients
            or different shards; all of them must call. Pass an empty list to clip on this process alone. Not needed for
            distributed tensors, which know their sharding, nor for DistributedDataParallel, which replicates gradients.
            A parameter group (`{"params": [...], "process_group": ...}`) may name its own.
        mesh: the same, given as a mesh of PyTorch: the processes along all of its dimensions.
        monitor: a `gradclip.Monitor` that records the norm and the threshold after each successful call.

    Returns:
        The norm before clipping, as `grad_norm` returns it.

    Raises:
        TypeError: a parameter has no `.grad`, the gradient of a parameter has an integer dtype, or `process_group` is
            not a process group.
        UserWarning: no parameter has a gradient. Among several processes, this is no warning.
        ValueError: a training engine (DeepSpeed ZeRO, Megatron) holds a gradient, or a parameter group has keys that
            look like settings of clipping; `max_norm` is negative or NaN, `ord` or `nonfinite` is unknown, gradients
            were passed instead of parameters, a generator is exhausted, an array in a tree is read-only, or arrays in a
            tree share memory as numbers of different formats, such as float32 and float64. With several processes:
            their arguments differ, this process is not in the group, parameters are FSDP1 shards without a group, or
            all processes of the group hold the same gradients.
        RuntimeError: another process failed or has ended.
        FloatingPointError: with `nonfinite="raise"`, the gradients contain NaN or infinity.

    After an error, the gradients are unchanged. If the norm is at most `max_norm`, nothing is written. On an
    accelerator, the call does not wait for the device (except with `nonfinite="raise"`), so it always writes.

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
        from gradclip.inplace.watched import check_monitor, clip_watched  # most calls have no monitor

        clip = partial(
            clip_grad_norm_, max_norm=max_norm, ord=ord, nonfinite=nonfinite, process_group=process_group, mesh=mesh
        )
        with telling(parameters, process_group, mesh):
            check_monitor(monitor)
        alone = process_group is None and mesh is None
        return clip_watched(clip, parameters, max_norm, ord, nonfinite, monitor, alone=alone)
    if process_group is None and mesh is None:
        parameters = fast_path.reusable(parameters)
        found = fast_path.clip_grad_norm_(parameters, max_norm, ord, nonfinite)
        if found is not None:
            return found
    if isinstance(max_norm, AdaptiveNorm):
        return _clip_by_holder(parameters, max_norm, ord, nonfinite, process_group, mesh)
    return _clip_to(max_norm, parameters, ord, nonfinite, process_group, mesh)[0]


def _clip_to(
    max_norm: Threshold,
    parameters: Parameters,
    ord: Ord | Order,
    nonfinite: Policy,
    process_group: ProcessGroups,
    mesh: Meshes,
    skip_above: float | None = None,
) -> tuple[Scalar, Seen | None]:
    """Clip by the general path. With `skip_above`, which all processes must share, say also what the norm shows."""
    params = _parameters(parameters, process_group, mesh)
    processes = processes_of(params, process_group, mesh)
    with processes.preparing():
        order, policy, threshold = Order.parse(ord), Nonfinite.named(nonfinite), whole_scalar(max_norm)
        processes.ask(order, policy, threshold, skip_above=math.inf if skip_above is None else skip_above)
        gradients, backend, arrays = entered(params, processes, threshold, to_write=True)
        clipping = Clipping(check_threshold(threshold, backend=backend), order, policy, CLIP)
    holders = processes.holders(backend)
    with backend.precision():
        if policy.zeroes and holders.sees_all:
            clipping = gradients.cleared(backend, arrays, clipping)
        made = decide(backend, arrays, clipping, gradients.names, holders=holders)
        norm = backend.leave_scalar(made.norm.product(), holders.norm_dtype(arrays), gradients.grads)
        shown = None if skip_above is None else seen(backend, made.norm, clipping.max_norm, skip_above)
        gradients.scale(backend, arrays, made)
    return norm, shown


@ordinary_arithmetic
def clip_grads_with_norm_(parameters: Parameters, max_norm: Threshold, total_norm: Threshold) -> None:
    """Scale the gradients of `parameters` in place by min(1, max_norm / total_norm), for a norm that you already have.

    Args:
        parameters: as in `clip_grad_norm_`.
        max_norm: the threshold, >= 0.
        total_norm: the norm of the gradients, >= 0, of any order >= 1: a number or a scalar array, trusted to float32
            precision. The bound holds if the true norm is no larger. If it is NaN, all gradients become NaN. If it is
            infinite, finite gradients become zero, unless `max_norm` is infinite too.

    Raises:
        TypeError, ValueError: as in `clip_grad_norm_`, also for `total_norm`. The gradients are then unchanged.

    On an accelerator the value of a scalar array is not read. There, a negative `total_norm` makes all gradients NaN.

    """
    max_norm, total_norm = whole_scalar(max_norm), whole_scalar(total_norm)
    gradients, backend, arrays = entered(ParameterList.of(parameters), ONE_PROCESS, max_norm, total_norm, to_write=True)
    threshold, norm = check_threshold(max_norm, backend=backend), check_norm(total_norm, backend=backend)
    with backend.precision():
        if arrays:
            gradients.scale(backend, arrays, from_norm(backend, norm, threshold, arrays))


@ordinary_arithmetic
def clip_grad_value_(parameters: Parameters, clip_value: Threshold) -> None:
    """Clamp each element of the gradients of `parameters` in place to [-clip_value, clip_value]. NaN stays NaN.

    Args:
        parameters: as in `clip_grad_norm_`.
        clip_value: the largest magnitude, >= 0. If a gradient's dtype cannot represent it, it is rounded toward zero.

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
    """Clip to the threshold that an `AdaptiveNorm` has for this step. Errors also reach the other processes."""
    with telling(parameters, process_group, mesh):
        parameters = repeatable(parameters)
        order, policy = Order.parse(ord), Nonfinite.named(nonfinite)
        max_norm.check_order(order)

    def clip_to(threshold: Threshold) -> tuple[Scalar, Seen | None]:
        found = fast_path.clip_grad_norm_(parameters, threshold, order, nonfinite) if alone else None
        more = (ord, nonfinite, process_group, mesh, max_norm.skip_above)
        return _clip_to(threshold, parameters, *more) if found is None else (found, None)

    alone = process_group is None and mesh is None
    return max_norm.clip(clip_to, order, policy)


def _parameters(parameters: Parameters, process_group: ProcessGroups, mesh: Meshes) -> ParameterList:
    """Return the parameters as a list. Errors also reach the other processes, if any are named."""
    with telling(parameters, process_group, mesh):
        return ParameterList.of(parameters)
