"""Clip right before each step of any PyTorch optimizer, so that nothing in the loop or in a trainer has to change."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from gradclip._src.backends import whole_scalar
from gradclip._src.backends.torch.tensors import tensor_of, without_values
from gradclip._src.core.nonfinite import DROP, PROPAGATE, Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.distributed.processes import ONE_PROCESS, Processes, processes_of, telling
from gradclip._src.inplace.groups import ParameterPart, parts_of
from gradclip._src.inplace.norm import clip_grad_norm_, grad_norm
from gradclip._src.monitor.monitor import Monitor
from gradclip._src.passed.arguments import check_monitor, check_threshold
from gradclip._src.passed.parameters import ParameterList, have_thresholds
from gradclip._src.step.fold import FusedClipping
from gradclip._src.step.handle import PartsWatched, StepClipping, StepPart, check_free, check_unclipped, groups_of
from gradclip._src.step.others import warn_of_own_clipping
from gradclip._src.step.within import Request, check_fused, check_listed_once, checked, forget_scaler
from gradclip._src.step.wrapped import parameters_of, unwrapped
from gradclip._src.thresholds.holder import AdaptiveThreshold
from gradclip._src.words import with_advice
from gradclip.typing import Meshes, Ord, ProcessGroups, StepPolicy, Threshold

_SAYING_NOTHING = frozenset(("params", "param_names", "initial_lr"))
"""Keys of parameter groups that do not change how gradients are clipped. Schedulers add the last."""


class ClippingBeforeStep(StepClipping):
    """Clipping of the gradients in place, right before the steps of one optimizer, until `remove()`."""

    def _checked(self, max_norm: Threshold) -> float:
        return float(check_threshold(max_norm))

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if _within_its_own_step(optimizer) else super()._begin(optimizer, args, kwargs)

    def _clip(self, optimizer: Optimizer, kwargs: Mapping[str, Any]) -> None:
        try:
            _check_unscaled(optimizer, kwargs)
            self._clip_unscaled(optimizer, groups_of(optimizer))
        except BaseException:
            forget_scaler(optimizer)
            raise

    def _clip_unscaled(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        request, max_norm = self._request, self._max_norm
        # GradScaler has seen what is not finite, and skips the step.
        policy = PROPAGATE if request.nonfinite.raises and "found_inf" in vars(optimizer) else request.nonfinite
        scaled = self._scaled if self._scaled is not None and self._scaled.scaler is not None else None
        policy = policy if scaled is None else DROP
        where: dict[str, Any] = {"process_group": request.process_group, "mesh": request.mesh}
        common, several = any("max_norm" not in group for group in groups), have_thresholds(groups)
        if several:
            self._take_thresholds(groups)
        followed = self._followed(groups, policy)
        parts = PartsWatched(self._monitor, common=common) if several else None
        given = groups if several or policy.raises or self._monitor is not None else _listed_if_plain(groups)
        monitor: Any = parts or self._monitor
        norm = tensor_of(
            clip_grad_norm_(given, max_norm, request.order, nonfinite=policy.name, monitor=monitor, **where)
        )
        skipped = self._skipped(norm, groups, followed, where)
        if scaled is not None and not without_values(norm) and not torch.isfinite(norm):
            scaled.overflowed(torch.ones(()))
            skipped = groups
        for parameter in (p for group in skipped for p in group["params"]):
            parameter.grad = None
        if parts is None:
            threshold: Any = max_norm.max_norm if isinstance(max_norm, AdaptiveThreshold) else max_norm
            self._stepped(norm, [StepPart.of(norm, max_norm, threshold)])
        else:
            self._stepped(norm, parts.parts, common=common)

    def _followed(self, groups: list[dict[str, Any]], policy: Nonfinite) -> list["_Followed"]:
        """Return each `AdaptiveThreshold` that skips, with its parameter groups and how many steps it has skipped."""
        common = [group for group in groups if "max_norm" not in group]
        each = [(self._max_norm, common), *((group["max_norm"], [group]) for group in groups if "max_norm" in group)]
        return [
            _Followed(one, of, one._counts["num_skipped"])
            for one, of in each
            if isinstance(one, AdaptiveThreshold) and of and (policy.blanks or one.skip_above < math.inf)
        ]

    def _skipped(
        self, norm: torch.Tensor, groups: list[dict[str, Any]], followed: list["_Followed"], where: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the groups that this step skips: the same on all processes. It waits for the device."""
        if without_values(norm):
            return []
        skipped = [group for one in followed if one.max_norm.num_skipped > int(one.before) for group in one.groups]
        if len(skipped) == len(groups) or not self._request.nonfinite.blanks or _all_follow(groups, followed):
            return skipped
        # A finite norm beyond float32 is returned as infinite, too.
        if not torch.isfinite(norm) and float(grad_norm(groups, self._request.order, **where)) == 0.0:
            return groups
        return skipped


class _Followed(NamedTuple):
    """An `AdaptiveThreshold` before a step."""

    max_norm: AdaptiveThreshold
    groups: list[dict[str, Any]]
    before: Any  # how many steps it had skipped; on an accelerator a tensor


def _all_follow(groups: list[dict[str, Any]], followed: list[_Followed]) -> bool:
    """Return whether every group has an `AdaptiveThreshold`, which counts the steps that a policy skips."""
    return sum(len(one.groups) for one in followed) == len(groups)


@with_advice
def clip_at_step(
    optimizer: Optimizer,
    max_norm: Threshold | AdaptiveThreshold,
    ord: Ord | Order = 2,
    *,
    nonfinite: StepPolicy = "propagate",
    process_group: ProcessGroups = None,
    mesh: Meshes = None,
    monitor: Monitor | None = None,
) -> StepClipping:
    """Make each `optimizer.step()` first clip the gradients of all its parameters together.

    Right before the update, gradients with the norm N are multiplied by min(1, max_norm / N). Nothing else in the loop
    changes, and trainers that call `step` themselves clip, too.

    Args:
        optimizer: any optimizer of PyTorch, also one that Lightning's `trainer.optimizers` or `accelerator.prepare`
            returns. If it steps another one, such as SAM, Lookahead, or the optimizer that Opacus returns, the steps of
            that one clip. Of a learning rate scheduler, or another object with an `.optimizer`, the steps of that
            optimizer clip. Two optimizers clip separately, and each needs its own `AdaptiveThreshold` and monitor.
        max_norm: the threshold in the units of unscaled gradients, >= 0, or a `gradclip.AdaptiveThreshold`. A parameter
            group with a key "max_norm" has a threshold of its own, as in `gradclip.clip_grad_norm_`.
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: as in `gradclip.clip_grad_norm_`, but "skip" really skips the step, as does the `skip_above` of an
            `AdaptiveThreshold`: the optimizer gets no gradients (each `.grad` is None), so that parameters and state
            do not change. Where groups have thresholds of their own, `skip_above` skips only the groups that share its
            threshold.
        process_group: as in `gradclip.clip_grad_norm_`. All processes must call `clip_at_step`, and step together.
        mesh: the same, given as a mesh.
        monitor: a `gradclip.Monitor` that records the norm and the threshold at each step.

    Returns:
        A `StepClipping`: read `.norm`, the norm before clipping at the last step; assign `.max_norm`; log `.numbers()`;
        call `.remove()` to stop.

    Raises:
        TypeError: `optimizer` is not an optimizer of PyTorch, or its steps cannot be seen. An engine such as DeepSpeed
            or Megatron clips by itself.
        ValueError: the steps of this optimizer clip already; the `AdaptiveThreshold` or the monitor follows another
            one; an argument that `gradclip.clip_grad_norm_` refuses. At a step: a GradScaler left the gradients scaled,
            and the optimizer cannot clip them so; the optimizer is one process's share of a ZeroRedundancyOptimizer.
        RuntimeError: this call or a step failed on another process.
        FloatingPointError: at a step with `nonfinite="raise"`, the gradients contain NaN or infinity.

    A step may also raise the errors of `gradclip.clip_grad_norm_`. After an error at a step, the parameters are
    unchanged.

    If `step` gets a closure, gradients are clipped after each call of the closure. LBFGS calls it several times in a
    step: each gradient that it sees is clipped, and each counts as a step for `norm`, an `AdaptiveThreshold` and a
        monitor.

    A fused optimizer that `fold_into` takes clips as `fold_into` does, in the same pass as its update and without
    waiting for a device. With any other, skipping steps waits for the accelerator at each step.

    The history of an `AdaptiveThreshold`, also of one in a parameter group, is saved in the optimizer's `state_dict`,
    under "gradclip", and loaded from there: call `clip_at_step` before you load a checkpoint. Functions that keep only
    "state" and "param_groups", such as `torch.distributed.checkpoint.state_dict`, lose it, as does an optimizer around
    the one that steps, such as SAM: save the `state_dict()` of what is returned beside them. A copy of the optimizer
    does not clip: call `clip_at_step` for it.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> clipping = clip_at_step(optimizer, max_norm=1.0)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> optimizer.step()
    >>> clipping.norm, weight.detach()
    (tensor(5.), tensor([-0.6000, -0.8000]))

    Two clippings at once are a mistake: if a trainer or the loop has clipped all of these gradients by their global
    norm, too, one of the first two steps warns with a `gradclip.ClippingWarning`. It hears of gradclip's functions and
    of those of `torch.nn.utils`, which accelerate, Hugging Face's Trainer and Lightning call. This call also warns of
    an optimizer that clips in its own step to a lower "max_grad_norm", as LAMB does.

    If `optimizer` never steps, and another one, which nothing clips, makes 100 steps with its parameters, the last of
    these warns.

    """
    # As if each group had a threshold: some may on other processes, and all must send messages of one length.
    with telling(getattr(optimizer, "param_groups", ()), process_group, mesh, each=True):
        found = unwrapped(optimizer)
        params = ParameterList.of(groups_of(found), own_thresholds=True)
    processes = processes_of(params, process_group, mesh, each=True)
    with processes.agreeing():
        request = Request(Order.parse(ord), Nonfinite.of_steps(nonfinite), process_group, mesh)
        check_unclipped(found)
        if monitor is not None:
            check_monitor(monitor)
        for given in (monitor, max_norm, *(group.get("max_norm") for group in found.param_groups)):
            check_free(given, parameters_of(found))
        if isinstance(max_norm, Mapping):
            check_threshold(max_norm)  # only calls take patterns of names
        _ask(processes, request, parts_of(params, max_norm, alone=processes is ONE_PROCESS))
    warn_of_own_clipping(found, max_norm)
    kind = FusedClipping if _folds(found, max_norm, request.nonfinite) else ClippingBeforeStep
    return kind(found, max_norm, request, monitor)


def _ask(processes: Processes, request: Request, parts: Sequence[ParameterPart]) -> None:
    """Check the thresholds, which must be the same on all processes."""
    limits = [part.threshold(request.order) for part in parts]
    for part, limit in zip(parts, limits, strict=True):
        if part.adaptive is None:
            check_threshold(limit, part.told)
    skip_above = max(part.skip_above for part in parts)
    processes.ask(request.order, request.nonfinite, list(map(whole_scalar, limits)), skip_above=skip_above)


def _folds(optimizer: Optimizer, max_norm: Threshold | AdaptiveThreshold, policy: Nonfinite) -> bool:
    """Return whether the optimizer can clip as it reads the gradients, by one divisor for all of them."""
    if policy.zeroes or any("max_norm" in group for group in optimizer.param_groups):
        return False
    try:
        check_fused(optimizer)
        check_listed_once(optimizer)
        checked(max_norm)
    except (TypeError, ValueError):
        return False
    return True


def _listed_if_plain(groups: list[dict[str, Any]]) -> Any:
    """Return the parameters in one list, which take fewer steps to clip, if the groups say nothing more of them."""
    if all(group.keys() <= _SAYING_NOTHING for group in groups):
        return [parameter for group in groups for parameter in group["params"]]
    return groups


def _check_unscaled(optimizer: Optimizer, kwargs: Mapping[str, Any]) -> None:
    """Raise a ValueError if a GradScaler leaves it to the step to unscale the gradients."""
    if vars(optimizer).get("grad_scale") is None and kwargs.get("grad_scaler") is None:
        return
    raise ValueError(
        f"GradScaler leaves the gradients scaled for this {type(optimizer).__name__}, whose step divides them, so they "
        "cannot be clipped before it. Call scaler.unscale_(optimizer) before scaler.step(optimizer). Or let the step "
        "itself clip: Adam, AdamW, SGD or Adagrad with fused=True, one threshold, and a nonfinite other than 'zero'."
    )


def _within_its_own_step(optimizer: Optimizer) -> bool:
    """Return whether the step that begins was called by a step of the same optimizer, which has clipped.

    PyTorch runs the hooks again when the step of a subclass calls that of its base.
    """
    kinds = [kind for kind in type(optimizer).__mro__ if "step" in vars(kind) and kind is not Optimizer]
    if len(kinds) < 2:
        return False
    code, frame, running = getattr(type(optimizer).step, "__code__", None), sys._getframe(), 0
    while frame is not None:
        running += frame.f_code is code and frame.f_locals.get("self") is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return running > 1
