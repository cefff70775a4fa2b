"""Count the steps that were skipped: by a policy, by a GradScaler, or because the loop did not call `step`."""

import math
from dataclasses import replace
from typing import Any

import torch

from gradclip._src.adaptive.holder import AdaptiveNorm
from gradclip._src.fused.guard_calls import ClipCall
from gradclip.typing import Scalar

OFTEN = 3
"""A GradScaler finds its scale by trying: fewer skipped steps in a row are ordinary."""

AT_FIRST = 40
"""Before the first step it may skip so many, each time with half the scale, and these do not count."""


class Skips:
    """The steps skipped so far: how many, and how many in a row until now.

    On an accelerator, what a step shows stays there until `read`, so that no step waits.
    """

    def __init__(self) -> None:
        self.count = self.streak = 0
        self._at_first = AT_FIRST
        self._scaler_alone = True
        self._call: ClipCall | None = None
        self._follows: AdaptiveNorm | None = None
        self._counted = 0.0  # what it has counted
        self._pending: list[tuple[str, Any, bool]] = []

    @property
    def unusual(self) -> bool:
        """Whether this streak is to be told: one step is enough, unless a GradScaler alone has skipped."""
        return self.streak >= (OFTEN if self._scaler_alone else 1)

    def clipped(self, call: ClipCall) -> bool:
        """Note a call that has clipped. Return whether it shows that the step before it was left out.

        It does if the same call was made before it with a norm that is not finite, and no step came between.
        """
        last, self._call = self._call, replace(call, parameters=(call.parameters or ())[:1])
        if last is None or last.norm is None or not _same(last, call) or math.isfinite(float(last.norm)):
            return False
        self._note(True, by_scaler=False)
        return True

    def passed(self, found_inf: torch.Tensor | None, *, by_scaler: bool) -> None:
        """Note a step that was called; `found_inf` is 1 if the optimizer itself skips it."""
        call, self._call = self._call, None
        if found_inf is not None:
            self._later("flag", found_inf, by_scaler)
        elif call is not None and isinstance(call.max_norm, AdaptiveNorm):
            counted = call.max_norm._counts["skipped"]
            if self._follows is not call.max_norm:  # it may have skipped steps before this guard was there
                self._follows = call.max_norm
                self._later("before", counted - _skipped_by(call, call.max_norm), False)
            self._later("count", counted, False)
        elif call is not None and call.nonfinite == "skip" and call.norm is not None:
            self._later("norm", call.norm, by_scaler)
        else:
            self._later("flag", 0.0, by_scaler)

    def left_out(self) -> None:
        """Note a step that a GradScaler did not call."""
        self._call = None
        self._note(True, by_scaler=True)

    def read(self) -> None:
        """Count the steps whose results are still on a device."""
        pending, self._pending = self._pending, []
        tensors = [value.detach().reshape(()) for _, value, _ in pending if isinstance(value, torch.Tensor)]
        if not tensors:
            return
        values = iter(torch.stack([one.to(tensors[0].device, torch.float32) for one in tensors]).tolist())
        for kind, value, by_scaler in pending:
            self._settle(kind, next(values) if isinstance(value, torch.Tensor) else float(value), by_scaler)

    def _later(self, kind: str, value: Scalar, by_scaler: bool) -> None:
        waits = isinstance(value, torch.Tensor) and value.device.type != "cpu"
        if waits or self._pending:
            self._pending.append((kind, value, by_scaler))
        else:
            self._settle(kind, float(value), by_scaler)

    def _settle(self, kind: str, value: float, by_scaler: bool) -> None:
        if kind == "before":
            self._counted = value
        elif kind == "count":
            before, self._counted = self._counted, value
            self._note(value > before, by_scaler=by_scaler)
        else:
            self._note(value == 1.0 if kind == "flag" else not math.isfinite(value), by_scaler=by_scaler)

    def _note(self, skipped: bool, *, by_scaler: bool) -> None:
        if not skipped:
            self.streak, self._at_first, self._scaler_alone = 0, 0, True
        elif by_scaler and self._at_first:
            self._at_first -= 1
        else:
            self.count, self.streak = self.count + 1, self.streak + 1
            self._scaler_alone = self._scaler_alone and by_scaler


def _skipped_by(call: ClipCall, max_norm: AdaptiveNorm) -> Any:
    """Return 1 if a call has skipped its step, else 0, by its norm."""
    norm = torch.as_tensor(call.norm)
    spike = norm > max_norm.skip_above * (math.inf if max_norm.threshold is None else max_norm.threshold)
    finite = torch.isfinite(norm)
    skipped = (spike & finite) | ~finite if call.nonfinite == "skip" else spike & finite
    return skipped.to(torch.float32) if norm.device.type != "cpu" else float(skipped)


def _same(one: ClipCall, other: ClipCall) -> bool:
    """Say whether two calls are the same, of two iterations."""
    first, second = one.parameters or (), other.parameters or ()
    return one.function == other.function and len(first) > 0 and len(second) > 0 and first[0] is second[0]
