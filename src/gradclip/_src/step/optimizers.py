"""Make the steps of a PyTorch optimizer clip: check what is asked for, on all processes, and choose how to do it."""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from gradclip._src.annotations import NamedThresholds, Threshold
from gradclip._src.backends import whole_scalar
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.distributed.processes import ONE_PROCESS, Processes, processes_of, telling
from gradclip._src.inplace.gradients import chosen
from gradclip._src.inplace.groups import ParameterPart, parts_of
from gradclip._src.monitor.monitor import Monitor
from gradclip._src.passed.arguments import check_monitor, check_threshold
from gradclip._src.passed.parameters import ParameterList
from gradclip._src.passed.unit_axes import scopes_of_leaves
from gradclip._src.step.asked import Asked, each_threshold
from gradclip._src.step.at_step import ClippingBeforeStep
from gradclip._src.step.fold import FusedClipping, check_foldable
from gradclip._src.step.handle import StepClipping, check_free, check_unclipped
from gradclip._src.step.others import warn_of_own_clipping
from gradclip._src.step.scoped import ScopedClipping
from gradclip._src.step.within import Request
from gradclip._src.step.wrapped import groups_of, parameters_of, unwrapped
from gradclip._src.thresholds.holder import AdaptiveThreshold


def attach(
    optimizer: Optimizer,
    max_norm: Threshold | AdaptiveThreshold | NamedThresholds,
    asked: Asked,
    monitor: Monitor | None,
) -> StepClipping:
    """Make the steps of an optimizer clip, as `clip_at_step` says."""
    process_group, mesh = asked.process_group, asked.mesh
    # As if each group had a threshold: some may on other processes, and all must send messages of one length.
    with telling(getattr(optimizer, "param_groups", ()), process_group, mesh, each=True):
        found = unwrapped(optimizer)
        params = ParameterList.of(groups_of(found), own_thresholds=True)
    processes = processes_of(params, process_group, mesh, each=True)
    with processes.agreeing():
        request = _request(asked)
        asked.check_scope(max_norm, monitor, found.param_groups)
        check_unclipped(found)
        if monitor is not None:
            check_monitor(monitor)
        for given in (monitor, *each_threshold(max_norm), *(group.get("max_norm") for group in found.param_groups)):
            check_free(given, parameters_of(found))
        alone = processes is ONE_PROCESS
        params = chosen(params, request.choice, alone=alone)
        if asked.unit_axis is not None:
            scopes_of_leaves(
                params.parameters, lambda: list(map(params.name, range(len(params.parameters)))), asked.unit_axis
            )
        _ask(processes, request, parts_of(params, max_norm, alone=alone))
        kind = _kind(found, max_norm, request, asked)
    warn_of_own_clipping(found, max_norm)
    return kind(found, max_norm, request, monitor)


def _request(asked: Asked) -> Request:
    asked.check()
    order, policy = Order.parse(asked.ord), Nonfinite.of_steps(asked.nonfinite)
    eps = 1e-3 if asked.eps is None else float(check_threshold(asked.eps, "eps"))
    names = asked.where, asked.integers
    return Request(order, policy, asked.process_group, asked.mesh, *names, asked.scope, eps, asked.unit_axis)


def _ask(processes: Processes, request: Request, parts: Sequence[ParameterPart]) -> None:
    """Check the thresholds, which must be the same on all processes."""
    limits = [part.threshold(request.order) for part in parts]
    for part, limit in zip(parts, limits, strict=True):
        if part.adaptive is None:
            check_threshold(limit, part.told)
    skip_above = max(part.skip_above for part in parts)
    agreed = ", ".join(part.agreed for part in parts)
    more: list[tuple[str, Any]] = [("the order of thresholds", agreed), *request.choice.told]
    more += [("scope", request.scope), ("eps", request.eps), ("unit_axis", repr(request.unit_axis))]
    scalars = list(map(whole_scalar, limits))
    processes.ask(request.order, request.nonfinite, scalars, skip_above=skip_above, more=more)


def _kind(
    optimizer: Optimizer, max_norm: Threshold | AdaptiveThreshold | NamedThresholds, request: Request, asked: Asked
) -> type[StepClipping]:
    """Return how the steps of an optimizer clip: within them, if they can and that is wanted, or before them."""
    if asked.scope != "global":
        return ScopedClipping
    if asked.fused is False:
        return ClippingBeforeStep
    try:
        check_foldable(optimizer, max_norm, request)
    except (TypeError, ValueError):
        if asked.fused is True:
            raise
        return ClippingBeforeStep
    return FusedClipping
