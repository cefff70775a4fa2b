"""Clip each layer, unit or element at the steps of an optimizer, instead of all gradients by one norm."""

import math
from typing import Any

import torch
from torch.optim import Optimizer

from gradclip._src.annotations import NamedThresholds, Threshold
from gradclip._src.backends import any_distributed
from gradclip._src.backends.torch.tensors import tensor_of, without_values
from gradclip._src.core.nonfinite import PROPAGATE
from gradclip._src.inplace.layers import clip_grad_layer_norm_
from gradclip._src.inplace.norm import clip_grad_norm_, clip_grad_value_, grad_norm
from gradclip._src.inplace.units import adaptive_grad_clip_, clip_grad_unit_norm_
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.passed.leaves import EVERY
from gradclip._src.step.asked import check_no_thresholds, check_scoped
from gradclip._src.step.at_step import ClippingBeforeStep, all_of, listed_if_plain
from gradclip._src.step.handle import StepPart, combined
from gradclip._src.thresholds.holder import AdaptiveThreshold


class ScopedClipping(ClippingBeforeStep):
    """Clipping of each layer, unit or element, right before the steps of one optimizer, until `remove()`."""

    def _checked(self, max_norm: Threshold | AdaptiveThreshold | NamedThresholds) -> float | AdaptiveThreshold:
        check_scoped(self._request.scope, max_norm)
        return max_norm if isinstance(max_norm, AdaptiveThreshold) else float(check_threshold(max_norm))

    _lost = False  # whether it is not known of a step what it clipped

    def numbers(self) -> dict[str, torch.Tensor]:
        """Return what to log of the last step, as far as it is known."""
        if self.norm is None or not self.steps:
            return {}
        if self._lost:
            return {"grad_norm": self.norm}
        clipped, _ = self._parts[0].shown(blanks=False)
        share = clipped.to(self.norm).mean() if self._parts[0].norm.ndim else torch.zeros_like(self.norm)
        return {**super().numbers(), f"clipped_{self._request.scope}_share": share}

    def _clip_unscaled(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        threshold = self._checked(self._max_norm)
        if self._skips_all(groups):
            self._record_skipped(groups, threshold)
            for parameter in all_of(groups):
                parameter.grad = None
            parts = [] if self.norm is None else [StepPart(self.norm, math.inf, math.inf)]
        else:
            parts = self._clip_parts(optimizer, groups, threshold)
            self.norm = combined(parts[0].norm, self._request.order.p) if parts else None
        if self.norm is not None and self._request.scope != "agc":
            self._stepped(self.norm, parts)
        else:
            self.steps, self._lost = self.steps + 1, True
        self.threshold = threshold.max_norm if isinstance(threshold, AdaptiveThreshold) else threshold

    def _clip_parts(
        self, optimizer: Optimizer, groups: list[dict[str, Any]], threshold: float | AdaptiveThreshold
    ) -> list[StepPart]:
        """Clip each part by its own norm; return the norms and thresholds in one vector each, if they are known."""
        request = self._request
        if request.scope in ("value", "agc"):
            check_no_thresholds(request.scope, groups)
        policy = request.nonfinite
        if policy.raises and "found_inf" in vars(optimizer):  # what is not finite skips the step
            policy = PROPAGATE
        named = policy.raises or self._monitor is not None or isinstance(threshold, AdaptiveThreshold)
        given: Any = groups if named or request.choice is not EVERY else listed_if_plain(groups)
        max_norm: Any = threshold
        if request.scope == "value":
            clip_grad_value_(given, max_norm, where=request.where, integers=request.integers)
            return []
        settings: dict[str, Any] = {"ord": request.order.p, "nonfinite": policy.of_call, **request.arguments}
        settings["monitor"] = self._monitor
        if request.scope == "agc":
            norms = adaptive_grad_clip_(given, max_norm, request.eps, unit_axis=request.unit_axis, **settings)
        elif request.scope == "unit":
            norms = clip_grad_unit_norm_(given, max_norm, unit_axis=request.unit_axis, **settings)
        else:
            norms = clip_grad_layer_norm_(given, max_norm, **settings)
        return self._parts_of(groups, norms, threshold)

    def _skips_all(self, groups: list[dict[str, Any]]) -> bool:
        """Return whether to skip the step, because gradients are not finite. It reads them all, and waits."""
        scaled = self._scaled if self._scaled is not None and self._scaled.scaler is not None else None
        if not self._request.nonfinite.blanks and scaled is None:
            return False
        largest = tensor_of(grad_norm(groups, math.inf, **self._request.arguments))
        if without_values(largest) or torch.isfinite(largest):
            return False
        if scaled is not None:
            scaled.overflowed(torch.ones(()))
        self.norm = None if self._request.scope == "value" else largest
        return True

    def _record_skipped(self, groups: list[dict[str, Any]], threshold: float | AdaptiveThreshold) -> None:
        """Have the monitor record a skipped step. Other processes may have no monitor, so it must not ask them.

        They all have an `AdaptiveThreshold`, which observes the layers that are finite.
        """
        if isinstance(threshold, AdaptiveThreshold):
            settings = {"monitor": self._monitor, "ord": self._request.order.p, **self._request.arguments}
            clip_grad_layer_norm_(groups, threshold, nonfinite="drop", **settings)
            return
        if self._monitor is None:
            return
        if self._alone:  # with the names of what is not finite
            settings = {"monitor": self._monitor, **self._request.arguments}
            clip_grad_norm_(groups, threshold, self._request.order, nonfinite="drop", **settings)
        else:
            self._monitor.record(self.norm, threshold, nonfinite="drop")

    def _parts_of(
        self, groups: list[dict[str, Any]], norms: list[Any], threshold: float | AdaptiveThreshold
    ) -> list[StepPart]:
        """Return the norms of all parts, and their thresholds, those of AGC aside; none if processes hold some."""
        counts, every = set(map(id, self._chosen(groups).parameters)), enumerate(all_of(groups))
        places = {id(one): place for place, one in every if norms[place] is not None and id(one) in counts}
        each = [tensor_of(norms[place]) for place in places.values()]
        if not each:
            return [StepPart(torch.zeros(()), math.inf, math.inf)]
        if any_distributed(each):
            return []
        vector = torch.cat([one.reshape(-1).to(each[0].device) for one in each])
        if not isinstance(threshold, AdaptiveThreshold):
            return [StepPart(vector, threshold, math.inf)]
        limits = tensor_of(threshold.max_norm).to(vector.device)
        chosen = limits if len(limits) == len(each) else limits[[*places.values()]]
        return [StepPart(vector, chosen, math.inf)]
