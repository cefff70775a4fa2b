"""Training engines, known by their types alone: what makes one clip is imported only then."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradclip._src.annotations import NamedThresholds, Threshold
from gradclip._src.core.nonfinite import PROPAGATE, Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.step.asked import Asked
from gradclip._src.step.wrapped import is_deepspeed, is_megatron
from gradclip._src.thresholds.holder import AdaptiveThreshold
from gradclip._src.words import listed

if TYPE_CHECKING:
    from gradclip._src.monitor.monitor import Monitor
    from gradclip._src.step.engine import EngineClipping


def attach_to_engine(
    given: Any, max_norm: Threshold | AdaptiveThreshold | NamedThresholds, asked: Asked, monitor: "Monitor | None"
) -> "EngineClipping | None":
    """Make the steps of a training engine clip; return None if it is none."""
    if is_deepspeed(given):
        from gradclip._src.step import deepspeed

        return deepspeed.attach(given, _checked(max_norm, asked, "DeepSpeed"), monitor)
    if is_megatron(given):
        from gradclip._src.step import megatron

        return megatron.attach(given, _checked(max_norm, asked, "Megatron-Core"), monitor)
    return None


def _checked(
    max_norm: Threshold | AdaptiveThreshold | NamedThresholds, asked: Asked, name: str
) -> Threshold | AdaptiveThreshold:
    """Return the threshold. Raises ValueError for settings that an engine cannot follow."""
    asked.check()
    own = {
        f"scope={asked.scope!r}": asked.scope != "global",
        "unit_axis": asked.unit_axis is not None,
        "fused=True": asked.fused is True,
        f"ord={asked.ord!r}": Order.parse(asked.ord) != Order(2.0),
        f"nonfinite={asked.nonfinite!r}": Nonfinite.of_steps(asked.nonfinite) is not PROPAGATE,
        "process_group": asked.process_group is not None,
        "mesh": asked.mesh is not None,
        "where": asked.where is not None,
        f"integers={asked.integers!r}": asked.integers != "keep",
    }
    if isinstance(max_norm, Mapping):
        raise ValueError(f"{name} clips all gradients by one norm, so max_norm cannot have patterns. Pass one number.")
    if any(own.values()):
        raise ValueError(
            f"{name} clips in its own step, by the norm of order 2 of all gradients, knows its processes, and decides "
            f"itself what to do about NaN. Leave out {listed([one for one, given in own.items() if given])}."
        )
    return max_norm
