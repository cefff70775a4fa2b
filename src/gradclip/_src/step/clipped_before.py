"""Warn if somebody else, such as a trainer, clips the gradients before a step that clips.

Such a call comes again at each step, so it is enough to listen until the second step.
"""

import math
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from gradclip._src.step import heard
from gradclip._src.step.heard import ClipCall, threshold_of
from gradclip._src.step.warned import ClippingWarning, level_of_user

_STEPS = 2
_ONLY_MEASURES = 1e6
"""A threshold from which on a call is made for the norm that it returns."""
_OWN = "max_grad_norm"
"""In the parameter groups of optimizers that clip the global norm in their step, such as LAMB."""

_stepping: "set[ClippedBefore]" = set()
"""Those whose steps are clipping now: other optimizers may have the same parameters."""


def own_thresholds(optimizer: Optimizer) -> list[float]:
    """Return the threshold to which the step of an optimizer clips each group itself; inf for none, as it says by 0."""
    if _OWN not in optimizer.defaults:
        return [math.inf]
    own = [group.get(_OWN) for group in optimizer.param_groups]
    return [float(one) if isinstance(one, int | float) and one > 0 else math.inf for one in own]


def warn_of_own_clipping(optimizer: Optimizer, max_norm: object) -> None:
    """Warn if the steps of an optimizer clip again, to a lower threshold of their own."""
    lowest = min(own_thresholds(optimizer))
    ours = [group.get("max_norm", max_norm) for group in optimizer.param_groups]
    if lowest == math.inf or all(isinstance(one, int | float) and one <= lowest for one in ours):
        return
    kind = type(optimizer).__name__
    warnings.warn(
        f"{kind} clips its gradients itself, to {lowest:g}: {_OWN!r} in its parameter groups. It does so after this "
        f"clipping, so thresholds above {lowest:g} have no effect. Leave one of the two out. To leave out {kind}'s, "
        f"set group[{_OWN!r}] = math.inf for each group in optimizer.param_groups.",
        ClippingWarning,
        stacklevel=level_of_user(),
    )


class ClippedBefore:
    """Listens for calls that clip the gradients of one optimizer by their global norm, until its second step."""

    watching = False  # it does not ask how many gradients there are
    clips = False

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._heard: ClipCall | None = None
        self._left = _STEPS
        heard.watch(self)

    def begin(self) -> None:
        """Warn of a call since the last step, once. What is heard until `end` is the step's own clipping."""
        _stepping.add(self)
        heard = self._heard
        if heard is None or not self._left:
            return
        self.stop()
        warnings.warn(
            f"{heard.function} has clipped these gradients to {threshold_of(heard):g} before the step clips them, and "
            "the step measures what is left. Leave one of the two out. In a trainer, switch its own clipping off: "
            "max_grad_norm=0.0 in Hugging Face's TrainingArguments, no gradient_clip_val in Lightning, no call of "
            "accelerator.clip_grad_norm_ in accelerate.",
            ClippingWarning,
            stacklevel=level_of_user(),
        )

    def end(self) -> None:
        """Listen again, or no more after enough steps."""
        _stepping.discard(self)
        if self._left:
            self._left -= 1
            if not self._left:
                self.stop()

    def stop(self) -> None:
        """Listen no more."""
        self._left, self._heard = 0, None
        heard.unwatch(self)

    # What it hears of

    def clipped(self, call: ClipCall) -> None:
        """Hear of a call. With a huge threshold it only measures. One for some of the gradients may be meant."""
        if _stepping or call.norm is None or call.several or not threshold_of(call) < _ONLY_MEASURES:
            return
        theirs = set(map(id, call.parameters or ()))
        if all(id(one) in theirs for group in self.optimizer.param_groups for one in group["params"]):
            self._heard = replace(call, parameters=None)  # its parameters may be freed before the step

    def stepping(self, scaler: torch.amp.GradScaler, outer: Any) -> None:
        """Hear that a GradScaler is about to step the optimizer."""

    def stepped(self, scaler: torch.amp.GradScaler, *, failed: bool) -> Any:
        """Hear that it has done so."""
