"""What a step has clipped: of all gradients together, or of each parameter group that has a threshold of its own."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gradclip._src.backends.torch.tensors import without_values
from gradclip._src.core.each_norm import EachNorm
from gradclip._src.monitor.monitor import Monitor
from gradclip._src.thresholds.holder import AdaptiveNorm
from gradclip.typing import Policy, Scalar, Threshold


class StepPart(NamedTuple):
    """Gradients that share a norm: the norm before clipping, the threshold, and above which multiple of it they skip.

    The threshold is a number, or on an accelerator a scalar tensor.
    """

    norm: torch.Tensor
    threshold: float | torch.Tensor
    skip_above: float

    @classmethod
    def of(cls, norm: Any, max_norm: Threshold | AdaptiveNorm, threshold: Scalar) -> "StepPart":
        """Return what a call with `max_norm` has clipped, to the threshold that it had at this call."""
        skip_above = max_norm.skip_above if isinstance(max_norm, AdaptiveNorm) else math.inf
        return cls(norm, threshold if isinstance(threshold, torch.Tensor) else float(threshold), skip_above)

    def shown(self, *, blanks: bool) -> tuple[Any, Any]:
        """Return whether the gradients were clipped, and whether they were skipped, as NaN and infinity if `blanks`."""
        norm, threshold = self.norm, self.threshold
        limit = threshold * self.skip_above if self.skip_above < math.inf else math.inf
        on_host = norm.device.type == "cpu" and not (isinstance(threshold, torch.Tensor) or without_values(norm))
        value: Any = norm.item() if on_host else norm
        finite = math.isfinite(value) if on_host else torch.isfinite(value)
        spike = (value > limit) & finite
        clipped = (value > threshold) & (value <= limit) & finite
        return clipped, spike | (finite == 0) if blanks else spike

    def left(self, *, blanks: bool) -> torch.Tensor:
        """Return the norm of what the optimizer got."""
        one = self.norm.new_ones(())
        clipped, skipped = (one * flag > 0 for flag in self.shown(blanks=blanks))
        return torch.where(clipped, one * self.threshold, self.norm).masked_fill(skipped, 0.0)


def left_of_all(parts: Sequence[StepPart], order: float, *, blanks: bool) -> torch.Tensor:
    """Return the norm of what the optimizer got of all parts together."""
    each = [part.left(blanks=blanks) for part in parts]
    if len(each) == 1:
        return each[0]
    norms = torch.stack([one.to(each[0].device) for one in each])
    largest = norms.max()
    by = torch.where((largest > 0) & torch.isfinite(largest), largest, torch.ones_like(largest))
    return torch.linalg.vector_norm(norms / by, order) * by


class PartsWatched:
    """Stands for a monitor of a call with several thresholds: it keeps the parts, and tells the monitor, if any.

    `common`: groups without a threshold of their own share one, which the call records as its step.
    """

    def __init__(self, monitor: Monitor | None, *, common: bool, parts: list[StepPart] | None = None) -> None:
        self.parts = [] if parts is None else parts
        self._monitor, self._common = monitor, common

    def of_group(self, name: str) -> "PartsWatched":
        """Return what stands for the monitor of a group."""
        monitor = None if self._monitor is None else self._monitor.of_group(name)
        return PartsWatched(monitor, common=True, parts=self.parts)

    def watching(self) -> EachNorm | None:
        """Return what takes the norm of each gradient, if the monitor needs it."""
        return None if self._monitor is None else self._monitor.watching()

    def watched(self, each: EachNorm | None) -> None:
        """Pass on the norms of the gradients."""
        if self._monitor is not None:
            self._monitor.watched(each)

    def missed(self, each: EachNorm | None) -> None:
        """Pass on the norms of the gradients of a call that raised."""
        if self._monitor is not None:
            self._monitor.missed(each)

    def record(self, norm: Scalar, max_norm: Threshold | AdaptiveNorm, *, nonfinite: Policy) -> None:
        """Take in what a call has clipped."""
        if self._common:
            threshold = max_norm.threshold if isinstance(max_norm, AdaptiveNorm) else max_norm
            self.parts.append(StepPart.of(norm, max_norm, threshold))
        if self._monitor is not None:
            self._monitor.record(norm, max_norm, nonfinite=nonfinite)
