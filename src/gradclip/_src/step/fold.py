"""Clip within the step of a fused PyTorch optimizer, which divides the gradients as it reads them.

A hook before the step measures the norm. It sets `optimizer.grad_scale`, by which the fused kernels divide, and
`optimizer.found_inf`, which makes them skip the step. A hook after the step restores both.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from gradclip._src.annotations import NamedThresholds, Threshold
from gradclip._src.core.nonfinite import DROP
from gradclip._src.monitor.monitor import Monitor
from gradclip._src.passed.leaves import EVERY
from gradclip._src.passed.parameters import have_thresholds
from gradclip._src.step.handle import StepClipping, StepPart
from gradclip._src.step.within import (
    INSTEAD,
    OF_SCALER,
    Guard,
    MeasuredStep,
    Request,
    check_fused,
    check_listed_once,
    checked,
    clear_momentum,
    forget_scaler,
    lay_out_gradients,
    without_momentum,
)
from gradclip._src.thresholds.holder import AdaptiveThreshold


class FusedClipping(StepClipping):
    """Clipping within the steps of one fused optimizer, until `remove()`."""

    _fused = True

    def __init__(
        self,
        optimizer: Optimizer,
        max_norm: Threshold | AdaptiveThreshold | NamedThresholds,
        request: Request,
        monitor: Monitor | None = None,
    ) -> None:
        super().__init__(optimizer, max_norm, request, monitor)
        self._before: dict[str, torch.Tensor | None] | None = None
        self._without_momentum: list[torch.Tensor] = []
        self._measured_last: MeasuredStep | None = None
        self._hooks.append(optimizer.register_step_post_hook(torch.compiler.disable(self._end)))
        self._guard = Guard(optimizer, self._failed)

    def _detached(self) -> None:
        super()._detached()
        self._restore(self._optimizer)
        self._guard.remove(self._optimizer)

    # The step

    def _checked(self, max_norm: Threshold | AdaptiveThreshold | NamedThresholds) -> float | AdaptiveThreshold:
        return checked(max_norm)

    def _clip(self, optimizer: Optimizer, kwargs: Mapping[str, Any]) -> None:
        self._restore(optimizer)
        given = {name: value for name, value in vars(optimizer).items() if name in OF_SCALER}
        found_inf = given.get("found_inf") if self._scaled is None else given.get("found_inf", self._scaled.found())
        if isinstance(found_inf, int):  # the GradScaler's sum over no gradients
            found_inf = torch.zeros(())
        each = None if self._monitor is None or not self._request.alone else self._monitor._watching()
        try:
            scale = given.get("grad_scale")
            measured = self._request.measured(optimizer, checked(self._max_norm), scale, found_inf, each)
        except BaseException as error:
            self._failed(optimizer)
            if self._monitor is not None and isinstance(error, FloatingPointError):
                self._monitor._missed(each)
            raise
        lay_out_gradients(optimizer)
        self.norm, self._before, self._measured_last = measured.norm, given, measured
        if measured.grad_scale is not None:
            optimizer.grad_scale = measured.grad_scale
        if measured.found_inf is not None:
            optimizer.found_inf = measured.found_inf
            self._without_momentum = without_momentum(optimizer)

    def _end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._without_momentum:
            clear_momentum(optimizer, self._without_momentum, vars(optimizer)["found_inf"] == 1.0)
        last = self._measured_last
        self._restore(optimizer)
        if last is None:
            return
        scaled, request = last.overflow is not None, self._request
        if self._scaled is not None and last.overflow is not None:
            self._scaled.overflowed(last.overflow)
        if last.shown is not None and isinstance(self._max_norm, AdaptiveThreshold):
            self._max_norm._observe(last.norm, last.max_norm, request.order, request.nonfinite, last.shown)
        self._stepped(last.norm, [StepPart.of(last.norm, self._max_norm, last.max_norm)])
        if self._monitor is not None:
            self._monitor._watched(last.each)
            # GradScaler skips what is not finite.
            policy = (DROP if scaled else request.nonfinite).name
            self._monitor.record(last.norm, self._max_norm, nonfinite=policy)

    def _skip(self) -> None:
        super()._skip()
        self._without_momentum = []  # no step makes it
        self._end(self._optimizer, (), {})

    def _failed(self, optimizer: Optimizer) -> None:
        """Restore the attributes after an error, and remove those of a GradScaler."""
        self._restore(optimizer)
        forget_scaler(optimizer)

    def _restore(self, optimizer: Optimizer) -> None:
        """Restore the attributes: GradScaler deletes those it has set, and other callers raise if they find them."""
        self._without_momentum, self._measured_last = [], None
        before, self._before = self._before, None
        if before is None:
            return
        for name in OF_SCALER:
            vars(optimizer).pop(name, None)
        vars(optimizer).update(before)


def check_foldable(
    optimizer: Optimizer, max_norm: Threshold | AdaptiveThreshold | NamedThresholds, request: Request
) -> None:
    """Raise if the steps of an optimizer cannot clip: TypeError for its class, else ValueError."""
    check_fused(optimizer)
    check_listed_once(optimizer)
    if request.nonfinite.zeroes:
        raise ValueError(
            f"a fused step cannot clip with nonfinite='zero', which must write the gradients before it. {INSTEAD}, or "
            "pass nonfinite='skip'."
        )
    if have_thresholds(optimizer.param_groups):
        raise ValueError(
            "a fused step divides all gradients by one number, and a parameter group has 'max_norm', a threshold of "
            f"its own. {INSTEAD}."
        )
    if request.choice is not EVERY:
        raise ValueError(
            f"a fused step clips all gradients of an optimizer, so it takes neither where= nor integers=. {INSTEAD}."
        )
    checked(max_norm)
