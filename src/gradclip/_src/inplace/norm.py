"""Clip in place: the gradients of parameters (objects with a `.grad`), or a tree of NumPy arrays.

Everything is checked and decided before the first element is written. Each parameter counts once, whatever memory its
gradient lies in, and memory is scaled once. If several processes hold parts of the gradients, each passes its own part,
and all get the same norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias, Unpack, overload

from gradclip._src import look
from gradclip._src.annotations import (
    Clips,
    Integers,
    Leaves,
    Meshes,
    NamedThresholds,
    NumPyArray,
    NumPyScalar,
    OnProcesses,
    Ord,
    Owners,
    Parameters,
    Policy,
    ProcessGroups,
    Scalar,
    Tensor,
    Threshold,
    Where,
)
from gradclip._src.backends import whole_scalar
from gradclip._src.core.decision import Clipping, from_norm
from gradclip._src.core.holders import ALONE
from gradclip._src.core.nonfinite import PROPAGATE, Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.core.pipeline import EachNorm
from gradclip._src.core.rules import CLIP, Seen
from gradclip._src.distributed.processes import ONE_PROCESS, processes_of, telling
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.inplace.driver import clip_each, clip_on_device, clip_taken
from gradclip._src.inplace.gradients import Gradients, Taken, chosen, entered
from gradclip._src.inplace.groups import clamp_by_parts, clip_by_parts, clip_ordinary, several_norms
from gradclip._src.monitor.monitor import Monitor
from gradclip._src.passed.arguments import check_monitor, check_norm, check_real, check_threshold, in_place
from gradclip._src.passed.leaves import EVERY, Choice, choice_of
from gradclip._src.passed.parameters import ParameterList, as_tuple, have_thresholds, repeatable, reusable
from gradclip._src.public import public
from gradclip._src.thresholds.holder import AdaptiveThreshold


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
    parameters, choice = reusable(parameters), choice_of(where, integers)
    params = None if where is None else chosen(ParameterList.of(parameters), choice, alone=True)
    limits = look.known_thresholds([total_norm, max_norm])
    given = None if limits is None else _to_write(parameters, params)
    if limits is not None and given is not None and given.clip_by_known_(*limits):
        return
    params = params or chosen(ParameterList.of(parameters), choice, alone=True)
    taken = entered(params, ONE_PROCESS, max_norm, total_norm, to_write=True)
    _, backend, arrays = taken
    threshold, norm = check_threshold(max_norm, backend=backend), check_norm(total_norm, backend=backend)
    with backend.precision():
        if arrays:
            taken.scale(from_norm(backend, norm, threshold, arrays))


@public
@in_place
def clip_grad_value_(
    parameters: Parameters,
    clip_value: Threshold | NamedThresholds,
    *,
    where: Where = None,
    integers: Integers = "keep",
) -> None:
    """Clamp each element of the gradients of `parameters` in place to [-clip_value, clip_value]. NaN stays NaN.

    Args:
        parameters: as in `gradclip.clip_grad_norm_`.
        clip_value: the largest magnitude, >= 0. If a gradient's dtype cannot represent it, it is rounded toward zero.
            A dict maps patterns of names to values, as in `gradclip.clip_grad_norm_`.
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
    parameters, choice = reusable(parameters), choice_of(where, integers)
    params = None if where is None else chosen(ParameterList.of(parameters), choice, alone=True)
    known = look.known_threshold(clip_value)
    given = None if known is None else _to_write(parameters, params)
    if known is not None and given is not None and given.clamp_(known):
        return
    params = params or chosen(ParameterList.of(parameters), choice, alone=True)
    if isinstance(clip_value, Mapping):
        clamp_by_parts(params, clip_value)
        return
    clip_value = whole_scalar(clip_value)
    taken = entered(params, ONE_PROCESS, clip_value, to_write=True)
    bound = check_threshold(clip_value, "clip_value", backend=taken.backend)
    with taken.backend.precision():
        check_real(taken.arrays, taken.gradients.names)
        taken.clamp(bound)


@overload
def grad_norm(parameters: Leaves[NumPyArray], ord: Ord | Order = 2, **options: Unpack[OnProcesses]) -> NumPyScalar: ...
@overload
def grad_norm(parameters: Owners[Tensor], ord: Ord | Order = 2, **options: Unpack[OnProcesses]) -> Tensor: ...
@overload
def grad_norm(parameters: Parameters, ord: Ord | Order = 2, **options: Unpack[OnProcesses]) -> Scalar: ...
@public
@with_subnormals
def grad_norm(
    parameters: Parameters,
    ord: Ord | Order = 2,
    *,
    process_group: ProcessGroups = None,
    mesh: Meshes = None,
    where: Where = None,
    integers: Integers = "keep",
) -> Scalar:
    """Return the global norm of the gradients of `parameters`, without changing them.

    Args:
        parameters: an iterable of objects with a `.grad`, or one such object; or a tree of NumPy arrays, the gradients
            themselves. A `.grad` of None is skipped. A parameter (in a tree: an array) that is listed twice counts
            once. Different ones count each, even if their gradients share memory.
        ord: which norm, as in `gradclip.global_norm`.
        process_group: the processes that hold different gradients, as in `clip_grad_norm_`.
        mesh: the same, given as a mesh.
        where: which gradients count, as in `clip_grad_norm_`.
        integers: "raise" refuses integers, as there.

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
    # With other processes, an error of the iterator must reach them.
    if isinstance(parameters, Iterator) and process_group is None and mesh is None:
        parameters = reusable(parameters)
    alone = process_group is None and mesh is None
    plain = where is None and integers == "keep"
    choice = EVERY if plain else checked_choice((where, integers), parameters, process_group, mesh)
    given = look.gradients(parameters) if alone and where is None else None
    found = None if given is None else given.norm(Order.parse(ord))
    if found is not None:
        return found
    params = chosen_parameters(parameters, choice, process_group, mesh)
    processes = processes_of(params, process_group, mesh)
    with processes.preparing():
        order = Order.parse(ord)
        processes.ask(order, PROPAGATE, more=params.choice.told)
        gradients, backend, arrays = entered(params, processes)
    holders = processes.holders(backend)
    with backend.precision():
        norm = holders.measure(backend, arrays, order)
        return backend.leave_scalar(norm.product(), holders.norm_dtype(arrays), gradients.grads)


class _Options(Clips, total=False):
    monitor: Monitor | None


_MaxNorm: TypeAlias = Threshold | AdaptiveThreshold | NamedThresholds


@overload
def clip_grad_norm_(
    parameters: Leaves[NumPyArray], max_norm: _MaxNorm, ord: Ord | Order = 2, **options: Unpack[_Options]
) -> NumPyScalar: ...
@overload
def clip_grad_norm_(
    parameters: Owners[Tensor], max_norm: _MaxNorm, ord: Ord | Order = 2, **options: Unpack[_Options]
) -> Tensor: ...
@overload
def clip_grad_norm_(
    parameters: Parameters, max_norm: _MaxNorm, ord: Ord | Order = 2, **options: Unpack[_Options]
) -> Scalar: ...
@public
@in_place
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: Threshold | AdaptiveThreshold | NamedThresholds,
    ord: Ord | Order = 2,
    *,
    nonfinite: Policy = "propagate",
    process_group: ProcessGroups = None,
    mesh: Meshes = None,
    monitor: Monitor | None = None,
    where: Where = None,
    integers: Integers = "keep",
) -> Scalar:
    """Scale the gradients of `parameters` in place by min(1, max_norm / norm). Their norm is then at most `max_norm`.

    Args:
        parameters: as in `grad_norm`. Gradients are written in place. A gradient that cannot be written (a JAX array, a
            read-only or expanded array) is replaced in its `.grad`. In a tree of NumPy arrays, all must be writable,
            but integers stay as they are and do not count. Memory that several gradients share is scaled once. Compiled
            code finds out which do when it is compiled.
        max_norm: the threshold, >= 0, in the units of the gradients; `inf` clips nothing. Pass a
            `gradclip.AdaptiveThreshold` for a threshold that follows the norms of past calls. A parameter group may
            have a threshold of its own, `{"params": [...], "max_norm": 2.0}`: its gradients are clipped by their own
            norm, or with None only measured. All other groups share one norm and the `max_norm` of the call. A dict
            maps patterns of names to thresholds, `{"encoder.*": 1.0, "*": 0.5}`: the first that matches counts, and all
            parameters of one pattern share a norm. NaN and infinity in one part count for all. With thresholds C1, C2,
            ... the norm of all is at most sqrt(C1**2 + C2**2 + ...).
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: "propagate", "raise", "zero" or "drop", as in `gradclip.clip_by_global_norm`.
        process_group: a process group of PyTorch, or a list of them, if each of its processes holds different gradients
            or different shards; all of them must call. Pass an empty list to clip on this process alone. Not needed for
            distributed tensors, which know their sharding, nor for DistributedDataParallel, which replicates gradients.
            A parameter group (`{"params": [...], "process_group": ...}`) may name its own. With `"shared": True` its
            gradients are scaled here, and counted by another process that has the same, such as a stage of a pipeline
            with tied weights.
        mesh: the same, given as a mesh of PyTorch: the processes along all of its dimensions.
        monitor: a `gradclip.Monitor` that records the norm and the threshold after each successful call. With
            nonfinite="raise", it also keeps the names of the gradients that made a call raise, in its `spikes`.
        where: the gradients that count, by the names of their parameters: a pattern such as "encoder.*", a list of
            patterns, or a function that says of a name whether it counts. All others are neither measured nor written.
            The parameters need names: pass `model.named_parameters()`, or a dict.
        integers: "keep" leaves integers in place of gradients as they are. "raise" is a TypeError that names them.

    Returns:
        The norm of all gradients before clipping, as `grad_norm` returns it.

    Raises:
        TypeError: a parameter has no `.grad`, all gradients are integers, or `process_group` is
            not a process group.
        UserWarning: no process has a gradient. On accelerators with named groups there is no such warning: it would
            wait for the device.
        ValueError: a training engine (DeepSpeed ZeRO, Megatron) holds a gradient, or a parameter group has keys that
            look like other settings of clipping; a parameter has two thresholds, a name matches no pattern, or a
            pattern no name; `max_norm` is negative or NaN, `ord` or `nonfinite` is unknown, gradients were passed
            instead of parameters, a generator is exhausted, an array in a tree is read-only, or arrays in a tree share
            memory as numbers of different formats, such as float32 and float64. With several processes:
            their arguments differ, this process is not in the group, parameters are FSDP1 shards without a group, or
            all processes of the group hold the same gradients.
        RuntimeError: another process failed or has ended.
        FloatingPointError: with `nonfinite="raise"`, the gradients contain NaN or infinity.

    After an error, the gradients are unchanged. If the norm is at most `max_norm`, nothing is written (near it, see
    `gradclip.clip_by_global_norm`). On an accelerator, the call does not wait for the device (except with
    `nonfinite="raise"`), so it always writes. Kernels for GPUs of gradclip's own write only what changes.

    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> layer = SimpleNamespace(grad=np.array([3.0, 4.0]))
    >>> float(clip_grad_norm_([layer], max_norm=1.0)), layer.grad.round(6).tolist()
    (5.0, [0.6, 0.8])
    >>> update = {"w": np.array([3.0, 4.0]), "b": np.array([12.0])}
    >>> float(clip_grad_norm_(update, max_norm=6.5)), update["b"].round(6).tolist()
    (13.0, [6.0])
    >>> update = {"w": np.array([3.0, 4.0]), "b": np.array([12.0])}
    >>> norm = float(clip_grad_norm_(update, {"w": 1.0, "*": None}))
    >>> norm, update["w"].round(6).tolist(), update["b"].tolist()
    (13.0, [0.6, 0.8], [12.0])

    """
    # With other processes, an error of the iterator must reach them.
    if isinstance(parameters, Iterator) and process_group is None and mesh is None:
        parameters = reusable(parameters)
    plain = where is None and integers == "keep"
    choice = EVERY if plain else checked_choice((where, integers), parameters, process_group, mesh)
    call = _Call(parameters, ord, nonfinite, process_group, mesh, choice)
    return call.clip(max_norm) if monitor is None else call.watched(max_norm, monitor)


def checked_choice(
    arguments: tuple[Where, Integers], parameters: Parameters, process_group: ProcessGroups, mesh: Meshes
) -> Choice:
    """Return the choice that `where` and `integers` make. Raises TypeError and ValueError."""
    with telling(parameters, process_group, mesh, each=have_thresholds(parameters)):
        return Choice(*arguments)


def chosen_parameters(
    parameters: Parameters, choice: Choice, process_group: ProcessGroups, mesh: Meshes, *, each: bool = False
) -> ParameterList:
    """List the parameters that count.

    `each`: the call measures several norms; so it does if their groups have thresholds.
    """
    with telling(parameters, process_group, mesh, each=each or have_thresholds(parameters)):
        params = ParameterList.of(parameters, own_thresholds=True)
        return chosen(params, choice, alone=not (as_tuple(process_group) or as_tuple(mesh)))


def _to_write(parameters: Parameters, params: ParameterList | None) -> look.Look | None:
    """Return gradients in host memory if one look may take them to be written. `params` are those that are chosen."""
    if params is None:
        return look.to_write(parameters)
    apart = not params.left or _lies_apart(params)
    return look.to_write(params.flat) if params.flat is not None and apart else None


def _lies_apart(params: ParameterList) -> bool:
    """Say whether the gradients that do not count are known to share no memory with those that do."""
    found = look.gradients([*params.parameters, *params.left.values()])
    return found is not None and (not isinstance(found, look.Look) or found.once is None)


class _Call(NamedTuple):
    """The arguments of a call that clips by the global norm, without the threshold."""

    parameters: Parameters
    ord: Ord | Order
    nonfinite: Policy
    process_group: ProcessGroups
    mesh: Meshes
    choice: Choice
    each: EachNorm | None = None  # takes the norm of each gradient, unless others may hold parts of it

    @property
    def alone(self) -> bool:
        """Whether no other processes are named."""
        return self.process_group is None and self.mesh is None

    def told(self, *, each: bool = False) -> ParameterList:
        """List the parameters that count."""
        return chosen_parameters(self.parameters, self.choice, self.process_group, self.mesh, each=each)

    def clip(self, max_norm: Threshold | AdaptiveThreshold | NamedThresholds) -> Scalar:
        return self.by_holder(max_norm) if isinstance(max_norm, AdaptiveThreshold) else self.clip_to(max_norm)[0]

    def clip_to(
        self, max_norm: Threshold | NamedThresholds, skip_above: float | None = None
    ) -> tuple[Scalar, Seen | None]:
        """Clip to a threshold. With `skip_above`, the same on all processes, also say what an unusual norm shows."""
        chosen = self.choice.where is not None
        params = self.told(each=isinstance(max_norm, Mapping)) if chosen or self.each is not None else None
        plain = self.parameters if params is None else self._plain(params, max_norm)
        known = look.to_clip(plain, max_norm) if self.alone and plain is not None else None
        found = None if known is None else self._at_once(*known, params, skip_above)
        if found is not None:
            return found
        params = params or self.told(each=isinstance(max_norm, Mapping))
        if several_norms(params.groups, max_norm):
            return self.by_parts(params, max_norm), None
        processes = processes_of(params, self.process_group, self.mesh)
        with processes.preparing():
            order, policy, bound = Order.parse(self.ord), Nonfinite.named(self.nonfinite), whole_scalar(max_norm)
            skip = math.inf if skip_above is None else skip_above
            processes.ask(order, policy, bound, skip_above=skip, more=params.choice.told)
            taken = entered(params, processes, bound, to_write=True)
            asked = Clipping(check_threshold(bound, backend=taken.backend), order, policy, CLIP)
        each = processes.watched(self.each)
        return clip_taken(taken, processes.holders(taken.backend), asked, skip_above, each)

    def _plain(self, params: ParameterList, max_norm: object) -> Parameters | None:
        """Return what one look may take: the parameters that count; None if other things count as well."""
        if params.flat is None and self.choice.where is None:
            return self.parameters
        several = self.choice.where is not None and several_norms(params.groups, max_norm)
        return None if several or (params.left and not _lies_apart(params)) else params.flat

    def _at_once(
        self,
        given: look.Look | look.OnDevice,
        threshold: Any,
        params: ParameterList | None,
        skip_above: float | None,
    ) -> tuple[Scalar, Seen | None] | None:
        """Clip arrays that kernels read. None if that is not possible in one look or few launches."""
        # Checked only now: with several processes, which never get here, an error must reach all of them.
        order, policy = Order.parse(self.ord), Nonfinite.named(self.nonfinite)
        asked = Clipping(threshold, order, policy, CLIP)
        if not isinstance(given, look.Look):
            return clip_on_device(given, asked, skip_above, params, self.each)
        if params is None or self.each is None:
            norm = given.clip_(threshold, order)
        else:
            norm = clip_each(given, threshold, order, params, self.each)
        if norm is not None:
            return norm, None
        gradients = Gradients.of(params or ParameterList.of(self.parameters))
        if given.once is not None or len(gradients.grads) != len(given.leaves):  # an empty one is listed twice
            return None
        taken = Taken(gradients, given.backend, given.arrays())
        return clip_taken(taken, ALONE, asked, skip_above, self.each)

    def by_holder(self, max_norm: AdaptiveThreshold) -> Scalar:
        """Clip to the threshold of an `AdaptiveThreshold` for this step. Errors also reach the other processes."""
        with telling(self.parameters, self.process_group, self.mesh, each=have_thresholds(self.parameters)):
            call = self._replace(parameters=repeatable(self.parameters))
            order, policy = Order.parse(self.ord), Nonfinite.named(self.nonfinite)
            max_norm._check_order(order)
        if several_norms(call.parameters, max_norm):
            return call.by_parts(call.told(each=True), max_norm)
        return max_norm._clip(partial(call.clip_to, skip_above=max_norm.skip_above), order, policy)

    def by_parts(
        self,
        params: ParameterList,
        max_norm: Threshold | AdaptiveThreshold | NamedThresholds,
        monitor: Monitor | None = None,
    ) -> Scalar:
        """Clip parts of the parameters by norms of their own."""
        settings = self.ord, self.nonfinite
        norm = clip_ordinary(params, max_norm, settings) if self.alone and monitor is None else None
        if norm is not None:
            return norm
        processes = processes_of(params, self.process_group, self.mesh, each=True)
        return clip_by_parts(params, processes, max_norm, settings, monitor)

    def watched(self, max_norm: Threshold | AdaptiveThreshold | NamedThresholds, monitor: Monitor) -> Scalar:
        """Clip, then have the monitor record the call; return the norm.

        The norm of each gradient is recorded only if no processes are named: others may hold other gradients.
        """
        each = several_norms(self.parameters, max_norm)
        with telling(self.parameters, self.process_group, self.mesh, each=each):
            check_monitor(monitor)
            call = self._replace(parameters=repeatable(self.parameters))
        if several_norms(call.parameters, max_norm):
            return call.by_parts(call.told(each=True), max_norm, monitor)
        call = call._replace(each=monitor._watching() if self.alone else None)
        try:
            norm = call.clip(max_norm)
        except FloatingPointError:
            monitor._missed(call.each)
            raise
        monitor._watched(call.each)
        monitor.record(norm, max_norm, nonfinite=self.nonfinite)
        return norm
