"""GradScaler where several processes step together: it skips the step only on those whose own gradients overflow.

The others would wait for them, since their steps measure one norm. So a process that is about to skip takes part in
that first. All of them then find that the norm is not finite, skip, and let their GradScalers lower the scale.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from gradclip._src.step import heard
from gradclip._src.step.heard import ClipCall


class ScaledSteps:
    """Hears of the steps that a GradScaler makes for one optimizer, until `stop`.

    Attributes:
        scaler: the GradScaler that makes the present step; None if there is none.

    """

    watching = False  # it does not ask how many gradients there are
    clips = True  # guards hear of a step before: on all processes they exchange first what overflows

    def __init__(self, optimizer: Optimizer, unscale: Callable[[Callable[[], None]], None], skip: Any) -> None:
        """Listen. `unscale` gets what unscales and may raise, `skip` takes part in a step that is skipped here."""
        self.optimizer = optimizer
        self.scaler: Any = None
        self._outer: Any = optimizer
        self._unscale, self._skip = unscale, skip
        heard.watch(self)

    def stop(self) -> None:
        """Listen no more."""
        heard.unwatch(self)

    def overflowed(self, anywhere: torch.Tensor) -> None:
        """Let the GradScaler lower its scale if gradients overflowed anywhere: then the scalar is 1."""
        if self.scaler is None:
            return
        by_device = self.scaler._per_optimizer_states[id(self._outer)]["found_inf_per_device"]
        if not by_device:  # this process has no gradients
            by_device[anywhere.device] = torch.zeros_like(anywhere)
        for found in by_device.values():
            found.copy_(torch.maximum(found, anywhere.to(found)))

    def found(self) -> torch.Tensor | None:
        """Return a scalar that is not 0 if the GradScaler has found an overflow here; None if there is none."""
        first, *others = self._infinities() or [None]
        return first if first is None else sum((one.to(first) for one in others), start=first)

    def _infinities(self) -> list[torch.Tensor]:
        return [] if self.scaler is None else infinities(self.scaler, self._outer)

    # What it hears of

    def clipped(self, call: ClipCall) -> None:
        """Hear of a call."""

    def stepping(self, scaler: torch.amp.GradScaler, outer: Any) -> None:
        """Hear that a GradScaler is about to step the optimizer, or one `outer` around it, or to skip the step."""
        self.scaler, self._outer = scaler, outer
        if getattr(outer, "_step_supports_amp_scaling", False):
            return  # it makes all steps
        self._unscale(lambda: unscaled(scaler, outer))
        if any(found.item() for found in infinities(scaler, outer)):
            self._skip()

    def stepped(self, scaler: torch.amp.GradScaler, *, failed: bool) -> None:
        """Hear that it has done so, or failed."""
        self.scaler = None


def unscaled(scaler: Any, optimizer: Optimizer) -> None:
    """Let a GradScaler unscale the gradients, as its step does, if nobody has called it before."""
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    if not infinities(scaler, optimizer):
        raise AssertionError("No inf checks were recorded for this optimizer.")  # as the step raises


def infinities(scaler: Any, optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the scalars, one for each device, that are 1.0 where a GradScaler has found gradients not finite."""
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
