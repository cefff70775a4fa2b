"""Clipping that a training engine does itself, to a threshold that it reads at each step.

DeepSpeed and Megatron hold the gradients and clip them in their own step. So the threshold has to be set before a step,
and the norm is known after it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradclip._src.annotations import Policy, Scalar, Threshold
from gradclip._src.backends import among_several
from gradclip._src.backends.torch.distributed import device_for
from gradclip._src.backends.torch.process_groups import Group
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.core.rules import Seen
from gradclip._src.monitor.monitor import Monitor
from gradclip._src.passed.arguments import check_monitor, check_threshold
from gradclip._src.public import record
from gradclip._src.step.attached import Attached, as_passed, many
from gradclip._src.step.handle import check_free, claim
from gradclip._src.thresholds.holder import AdaptiveThreshold

_ORDER = Order(2.0)
_ROUNDING = 1e-3  # by which norms may differ between ranks
_FAILED = 0.0  # what a rank without a threshold sends


@record
class EngineClipping(Attached):
    """Clipping in the steps of one training engine, until `remove()`.

    Attributes:
        norm: the norm before clipping at the last step, a float: NaN or inf if the gradients were not finite. None
            before the first step.
        threshold: the threshold of the last step, a number; None before the first.
        max_norm: the threshold, or the `AdaptiveThreshold` that sets it. You may assign a new one, on every rank.
        steps: the number of steps, also of those that the engine has skipped.

    """

    def __init__(
        self,
        engine: object,
        name: str,
        max_norm: Threshold | AdaptiveThreshold,
        monitor: Monitor | None,
        *,
        skips: bool = False,
    ) -> None:
        self._kind, self._name, self._skips = type(engine).__name__, name, skips
        self._undo: Callable[[], None] | None = None
        self._monitor = monitor
        self.max_norm = max_norm
        if monitor is not None:
            check_monitor(monitor)
            check_free(monitor)
            claim(monitor, self)
        self.norm: float | None = None
        self.threshold: float | None = None
        self.steps = self._clipped = self._num_skipped = 0
        self._skipped = False

    @property
    def max_norm(self) -> float | AdaptiveThreshold:
        """The threshold, or the `AdaptiveThreshold` that sets it."""
        return self._max_norm

    @max_norm.setter
    def max_norm(self, value: Threshold | AdaptiveThreshold) -> None:
        check_free(value, holder=self)
        self._max_norm: float | AdaptiveThreshold = self._checked(value)
        claim(value, self)

    def _follows(self, given: object) -> bool:
        """Return whether the engine clips, and its norms are recorded in what is given."""
        return self._undo is not None and (given is self._max_norm or given is self._monitor)

    def _clips(self) -> frozenset[int]:
        """Return no parameters: the engine holds them."""
        return frozenset()

    def _checked(self, value: Threshold | AdaptiveThreshold) -> float | AdaptiveThreshold:
        if not isinstance(value, AdaptiveThreshold):
            return self._above_zero(float(check_threshold(value)))
        value._check_order(_ORDER)
        if value.skip_above < math.inf and not self._skips:
            raise ValueError(
                f"{self._name} cannot skip steps with a large norm, so skip_above={value.skip_above!r} would have no "
                "effect. Pass an AdaptiveThreshold without skip_above, which clips such steps."
            )
        return value

    def _above_zero(self, threshold: float) -> float:
        if threshold > 0:
            return threshold
        raise ValueError(
            f"max_norm must be above 0, got {threshold!r}: {self._name} takes 0 to mean that nothing is clipped. Pass "
            "math.inf to clip nothing, or a learning rate of 0 to stop all updates."
        )

    def _undone_by(self, undo: Callable[[], None]) -> "EngineClipping":
        """Take what gives the engine back as it was; return the clipping itself."""
        self._undo = undo
        return self

    def remove(self) -> None:
        """Give the engine its own threshold back: from the next step on, it clips as before."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    _called = "EngineClipping"

    def _says(self) -> Sequence[str]:
        return self._kind, as_passed(self._max_norm), "scope='global'", many(self.steps, "step")

    @property
    def _is_removed(self) -> bool:
        return self._undo is None

    def numbers(self) -> dict[str, float]:
        """Return what to log of the last step; empty before the first.

        "grad_norm" is the norm before clipping, "grad_norm_clipped" that of what the optimizer got, "clipped_share" and
        "skipped_share" the shares of the steps that were clipped and skipped. A step that the engine skipped is not
        clipped, and got 0.
        """
        if self.norm is None or self.threshold is None:
            return {}
        got = min(self.norm, self.threshold) if math.isfinite(self.norm) else self.norm
        got = 0.0 if self._skipped else got
        shares = {"clipped_share": self._clipped / self.steps, "skipped_share": self._num_skipped / self.steps}
        return {"grad_norm": self.norm, "grad_norm_clipped": got, **shares}

    # Called at each step

    def _next_threshold(self) -> float:
        """Return the threshold of the next step, the same on all ranks. All of them must ask.

        Raises ValueError if it is 0, RuntimeError if the ranks have different thresholds or one of them has failed.
        """
        if not among_several():
            return self._own()
        try:
            found = self._own()
        except Exception:
            _smallest(_FAILED)
            raise
        least, most = _smallest(found)
        if least == _FAILED:
            raise RuntimeError("clipping failed on another rank. Its error says why. No parameter has been changed.")
        if most > least * (1 + _ROUNDING):
            raise RuntimeError(
                f"the ranks have different thresholds, from {least!r} to {most!r}; here it is {found!r}. Make equal "
                "AdaptiveThresholds on all ranks, and load the same state into all of them. No parameter has been "
                "changed."
            )
        return least

    def _own(self) -> float:
        kept = self._max_norm
        return self._above_zero(float(kept._for_order(_ORDER))) if isinstance(kept, AdaptiveThreshold) else kept

    @property
    def _skip_above(self) -> float:
        """Above how many times the threshold the engine is to skip a step."""
        return self._max_norm.skip_above if isinstance(self._max_norm, AdaptiveThreshold) else math.inf

    def _stepped(self, norm: Scalar, threshold: float, *, skipped: bool) -> None:
        """Take in the norm of a step, and whether the engine skipped it. A norm below 0 stands for one not finite."""
        value = float(norm)
        self.norm = value if value >= 0 else math.nan
        self.threshold, self._skipped, self.steps = threshold, skipped, self.steps + 1
        finite = math.isfinite(self.norm)
        self._clipped += finite and self.norm > threshold and not skipped
        self._num_skipped += skipped
        policy: Policy = "drop" if skipped and not finite else "propagate"
        kept = self._max_norm
        if isinstance(kept, AdaptiveThreshold):
            seen = Seen(finite, finite and self.norm > threshold, finite and skipped)
            kept._observe(np.float64(self.norm), threshold, _ORDER, Nonfinite.named(policy), seen)
        if self._monitor is not None:
            above = 1.0 if skipped and math.isinf(self._skip_above) else self._skip_above
            self._monitor.record(self.norm, threshold, nonfinite=policy, skip_above=above)

    # Saving and loading

    def state_dict(self) -> dict[str, Any]:
        """Return the norm of the last step and the state of the `AdaptiveThreshold` as numbers, for any checkpoint."""
        kept = self._max_norm
        return {"norm": self.norm, "max_norm": kept.state_dict() if isinstance(kept, AdaptiveThreshold) else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Load it on every rank.

        Raises ValueError if it is no such state, or if one of the two thresholds is fixed and the other adaptive.
        """
        if set(state) != {"norm", "max_norm"}:
            got = ", ".join(map(str, state)) or "nothing"
            raise ValueError(f"the state has norm and max_norm; got {got}. Pass the result of state_dict().")
        kept, saved = self._max_norm, state["max_norm"]
        if (saved is None) is isinstance(kept, AdaptiveThreshold):
            one, other = (
                ("a fixed threshold", "an AdaptiveThreshold") if saved is None else ("an AdaptiveThreshold", "a number")
            )
            raise ValueError(f"the state is that of {one}, but max_norm is {other}. Pass clip_at_step the same kind.")
        if isinstance(kept, AdaptiveThreshold):
            kept.load_state_dict(saved)
        self.norm = state["norm"]


def _smallest(threshold: float) -> tuple[float, float]:
    """Return the smallest and the largest threshold of all ranks."""
    world = Group(tuple(range(dist.get_world_size())), dist.group.WORLD)
    both = torch.tensor([threshold, -threshold], dtype=torch.float64, device=device_for([world], ()))
    dist.all_reduce(both, dist.ReduceOp.MIN)
    least, most = both.tolist()
    return least, -most
