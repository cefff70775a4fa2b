"""Clip right before each step of any PyTorch optimizer, so that nothing in the loop or in a trainer has to change."""

import math
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from gradclip._src.annotations import NamedThresholds, Threshold
from gradclip._src.backends.torch.tensors import tensor_of, without_values
from gradclip._src.core.nonfinite import DROP, PROPAGATE, Nonfinite
from gradclip._src.distributed.processes import telling
from gradclip._src.inplace.gradients import chosen
from gradclip._src.inplace.groups import parts_of, several_norms
from gradclip._src.inplace.norm import clip_grad_norm_, grad_norm
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.passed.leaves import EVERY
from gradclip._src.passed.parameters import ParameterList
from gradclip._src.step.asked import each_threshold
from gradclip._src.step.handle import PartsWatched, StepClipping, StepPart
from gradclip._src.step.within import forget_scaler
from gradclip._src.step.wrapped import groups_of
from gradclip._src.thresholds.holder import AdaptiveThreshold

_SAYING_NOTHING = frozenset(("params", "param_names", "initial_lr"))
"""Keys of parameter groups that do not change how gradients are clipped. Schedulers add the last."""


class ClippingBeforeStep(StepClipping):
    """Clipping of the gradients in place, right before the steps of one optimizer, until `remove()`."""

    def _checked(
        self, max_norm: Threshold | AdaptiveThreshold | NamedThresholds
    ) -> float | AdaptiveThreshold | NamedThresholds:
        if isinstance(max_norm, AdaptiveThreshold):
            return max_norm
        if not isinstance(max_norm, Mapping):
            return float(check_threshold(max_norm))
        for part in parts_of(self._chosen(groups_of(self._optimizer)), max_norm, alone=self._alone):
            if part.adaptive is None:
                check_threshold(part.threshold(self._request.order), part.told)
        return MappingProxyType(dict(max_norm))

    def _chosen(self, groups: list[dict[str, Any]]) -> ParameterList:
        """List the parameters that count."""
        return chosen(ParameterList.of(groups, own_thresholds=True), self._request.choice, alone=self._alone)

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if within_its_own_step(optimizer) else super()._begin(optimizer, args, kwargs)

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
        settings = request.arguments
        named, several = isinstance(max_norm, Mapping), several_norms(groups, max_norm)
        common = not named and any("max_norm" not in group for group in groups)
        if several:
            self._take_thresholds(groups)
        followed = self._followed(groups, policy)
        parts = PartsWatched(self._monitor, common=common) if several else None
        plain = not (several or policy.raises or self._monitor is not None or request.choice is not EVERY)
        given = listed_if_plain(groups) if plain else groups
        monitor: Any = parts or self._monitor
        norm = tensor_of(
            clip_grad_norm_(given, max_norm, request.order, nonfinite=policy.of_call, monitor=monitor, **settings)
        )
        skipped = self._skipped(norm, groups, followed)
        if scaled is not None and not without_values(norm) and not torch.isfinite(norm):
            scaled.overflowed(torch.ones(()))
            skipped = all_of(groups)
        for parameter in skipped:
            parameter.grad = None
        if parts is None:
            threshold: Any = max_norm.max_norm if isinstance(max_norm, AdaptiveThreshold) else max_norm
            self._stepped(norm, [StepPart.of(norm, max_norm, threshold)])
        else:
            self._stepped(norm, parts.parts, common=common)

    def _followed(self, groups: list[dict[str, Any]], policy: Nonfinite) -> list["_Followed"]:
        """Return each `AdaptiveThreshold` that skips, with its parameters and how many steps it has skipped."""
        given = [*each_threshold(self._max_norm), *(group.get("max_norm") for group in groups)]
        if not any(
            isinstance(one, AdaptiveThreshold) and (policy.blanks or one.skip_above < math.inf) for one in given
        ):
            return []
        request = self._request
        with telling(groups, request.process_group, request.mesh, each=several_norms(groups, self._max_norm)):
            params = self._chosen(groups)
            parts = parts_of(params, self._max_norm, alone=self._alone)
        return [
            _Followed(one, [params.parameters[place] for place in part.places], one._counts["num_skipped"])
            for part in parts
            if (one := part.adaptive) is not None and (policy.blanks or one.skip_above < math.inf)
        ]

    def _skipped(self, norm: torch.Tensor, groups: list[dict[str, Any]], followed: list["_Followed"]) -> list[Any]:
        """Return the parameters that this step skips: the same on all processes. It waits for the device."""
        if without_values(norm):
            return []
        every, request = all_of(groups), self._request
        skipped = [p for one in followed if one.max_norm.num_skipped > int(one.before) for p in one.parameters]
        # An AdaptiveThreshold counts the steps that a policy skips.
        all_follow = sum(len(one.parameters) for one in followed) == len(every)
        if not request.nonfinite.blanks or all_follow or len(skipped) == len(every):
            return skipped
        # A finite norm beyond float32 is returned as infinite, too.
        if not torch.isfinite(norm) and float(grad_norm(groups, request.order, **request.arguments)) == 0.0:
            return every
        return skipped


class _Followed(NamedTuple):
    """An `AdaptiveThreshold` before a step."""

    max_norm: AdaptiveThreshold
    parameters: list[Any]
    before: Any  # how many steps it had skipped; on an accelerator a tensor


def all_of(groups: list[dict[str, Any]]) -> list[Any]:
    """Return the parameters of all groups."""
    return [parameter for group in groups for parameter in group["params"]]


def listed_if_plain(groups: list[dict[str, Any]]) -> Any:
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


def within_its_own_step(optimizer: Optimizer) -> bool:
    """Return whether the step that begins was called by a step of the same optimizer, which has clipped.

    PyTorch runs the hooks again when the step of a subclass calls that of its base.
    """
    kinds = [kind for kind in type(optimizer).__mro__ if "step" in vars(kind) and kind is not Optimizer]
    return len(kinds) > 1 and is_stepping(optimizer)


def is_stepping(optimizer: Optimizer) -> bool:
    """Return whether the step that begins was called within a step of the same optimizer."""
    code, frame, running = getattr(type(optimizer).step, "__code__", None), sys._getframe(), 0
    while frame is not None:
        running += frame.f_code is code and frame.f_locals.get("self") is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return running > 1
