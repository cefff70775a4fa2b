"""Megatron-Core's optimizers, which hold the gradients in `.main_grad` and clip in their own step.

They read `clip_grad` and `grad_norm_skip_threshold` of their `OptimizerConfig` at each step, and return the norm. So
each step sets these, and takes in the norm after.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from gradclip._src.annotations import Threshold
from gradclip._src.step.engine import EngineClipping
from gradclip._src.step.wrapped import configurations
from gradclip._src.thresholds.holder import AdaptiveThreshold

if TYPE_CHECKING:
    from gradclip._src.monitor.monitor import Monitor

_CLIP, _SKIP = "clip_grad", "grad_norm_skip_threshold"


class Configured(Protocol):
    """What is used of an optimizer of Megatron-Core."""

    config: Any
    step: Callable[..., Any]


def attach(optimizer: Configured, max_norm: Threshold | AdaptiveThreshold, monitor: "Monitor | None") -> EngineClipping:
    """Make each step of a Megatron-Core optimizer clip, as `clip_at_step` says."""
    configs = _configs(optimizer)
    if getattr(optimizer.step, "followed", False):
        raise ValueError(
            "the steps of this optimizer clip already: clip_at_step was already called for it. Assign max_norm of what "
            "it returned, or call its remove() first."
        )
    skips = all(hasattr(config, _SKIP) for config in configs)
    clipping = EngineClipping(optimizer, "This Megatron-Core", max_norm, monitor, skips=skips)
    return clipping._undone_by(_followed(optimizer, configs, clipping))


def _configs(optimizer: Configured) -> list[Any]:
    """Return the configurations that the steps of an optimizer read, each once."""
    found = {id(one): one for one in configurations(optimizer)}
    for config in found.values():
        if getattr(config, "optimizer_cuda_graph", False):
            raise ValueError(
                "the step of this optimizer is recorded in a CUDA graph, which keeps the threshold of the recording. "
                "Set optimizer_cuda_graph=False."
            )
    return list(found.values())


def _followed(optimizer: Configured, configs: list[Any], clipping: EngineClipping) -> Callable[[], None]:
    """Wrap the optimizer's step, and return what undoes it."""
    step, own = optimizer.step, vars(optimizer).get("step")

    def stepped(*args: object, **kwargs: object) -> Any:
        threshold = clipping._next_threshold()
        skips = {} if math.isinf(clipping._skip_above) else {_SKIP: clipping._skip_above * threshold}
        with _set(configs, {_CLIP: threshold, **skips}):
            result = step(*args, **kwargs)
        succeeded, norm, *_ = result
        clipping._stepped(math.inf if norm is None else norm, threshold, skipped=not succeeded)
        return result

    def undo() -> None:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own

    stepped.followed = True  # type: ignore[attr-defined]
    optimizer.step = stepped
    return undo


@contextmanager
def _set(configs: list[Any], settings: dict[str, float]) -> Iterator[None]:
    """Set what a step reads, and take it back after: other optimizers may have the same configuration."""
    before = [(config, name, getattr(config, name)) for config in configs for name in settings]
    try:
        for config, name, _ in before:
            setattr(config, name, settings[name])
        yield
    finally:
        for own in before:
            setattr(*own)
