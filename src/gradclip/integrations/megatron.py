"""An adaptive threshold and a record of the norms for Megatron-Core, which clips in its optimizer's step.

Megatron holds the gradients in `.main_grad`. Its optimizer reads `clip_grad` and `grad_norm_skip_threshold` of its
`OptimizerConfig` at each step, and returns the norm. `follow` sets them for each step, and takes in the norm after.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from gradclip._src.thresholds.holder import AdaptiveThreshold
from gradclip._src.words import with_advice
from gradclip.integrations import needed_for
from gradclip.typing import Threshold

with needed_for("megatron", "torch"):
    from gradclip._src.step.engine import EngineClipping

if TYPE_CHECKING:
    from gradclip._src.monitor.monitor import Monitor

__all__ = ["follow"]

_CLIP, _SKIP = "clip_grad", "grad_norm_skip_threshold"


class Optimizer(Protocol):
    """What `follow` uses of an optimizer of Megatron-Core."""

    config: Any
    step: Callable[..., Any]


@with_advice
def follow(
    optimizer: Optimizer, max_norm: Threshold | AdaptiveThreshold, *, monitor: "Monitor | None" = None
) -> EngineClipping:
    """Make each step of a Megatron-Core optimizer clip to `max_norm`, and take in the norm it returns.

    Args:
        optimizer: a `MegatronOptimizer`, as `get_megatron_optimizer` returns it. `clip_grad` of its configuration no
            longer counts, but for other optimizers that have the same configuration. The optimizers of a
            `ChainedOptimizer` share the threshold.
        max_norm: the threshold, above 0; `inf` clips nothing. Or a `gradclip.AdaptiveThreshold`. Its `skip_above` sets
            `grad_norm_skip_threshold`: Megatron then leaves out the update.
        monitor: a `gradclip.Monitor` that records the norm and the threshold of each step.

    Returns:
        An `EngineClipping`: read `.norm`, the norm before clipping at the last step; assign `.max_norm`; call
        `.remove()` to stop. To resume, save its `state_dict()` in your checkpoint, and pass it to its
        `load_state_dict`.

    Raises:
        TypeError: `optimizer` has no `step` or no configuration with `clip_grad`.
        ValueError: `max_norm` is 0, which Megatron takes for no clipping; `skip_above` is set, but the configuration
            has no `grad_norm_skip_threshold`; the optimizer is followed already, or its step is in a CUDA graph, where
            the threshold is constant.
        RuntimeError: at a step, the ranks have different thresholds. Nothing has been changed.

    A step that Megatron leaves out because of an overflow counts as skipped. It has no norm, so inf is recorded. Call
    `follow` on every rank, with equal arguments: at each step, the ranks compare their thresholds.

    Tested with the optimizers of Megatron-Core 0.16.1. It has no `grad_norm_skip_threshold`: that setting of its main
    branch was tested with stand-ins.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(clip_grad=1.0)
    >>> step = lambda: (True, 5.0, None)
    >>> optimizer = SimpleNamespace(config=config, step=step)  # a stand-in
    >>> clipping = follow(optimizer, 2.0)
    >>> optimizer.step()
    (True, 5.0, None)
    >>> clipping.norm, clipping.max_norm
    (5.0, 2.0)

    """
    configs = _configs(optimizer)
    if getattr(optimizer.step, "followed", False):
        raise ValueError(
            "follow was already called for this optimizer. Assign max_norm of what it returned, or call its remove() "
            "first."
        )
    skips = all(hasattr(config, _SKIP) for config in configs)
    clipping = EngineClipping("This Megatron-Core", max_norm, monitor, skips=skips)
    return clipping.undone_by(_followed(optimizer, configs, clipping))


def _configs(optimizer: Optimizer) -> list[Any]:
    """Return the configurations that the steps of an optimizer read, each once."""
    found = {id(one): one for one in map(_config, _optimizers(optimizer)) if one is not None}
    if not callable(getattr(optimizer, "step", None)) or not found:
        raise TypeError(
            "optimizer must be a Megatron-Core optimizer, with a step and a config that has clip_grad, got "
            f"{type(optimizer).__name__}. Pass what get_megatron_optimizer returns."
        )
    for config in found.values():
        if getattr(config, "optimizer_cuda_graph", False):
            raise ValueError(
                "the step of this optimizer is recorded in a CUDA graph, which keeps the threshold of the recording. "
                "Set optimizer_cuda_graph=False."
            )
    return list(found.values())


def _config(optimizer: object) -> Any:
    config = getattr(optimizer, "config", None)
    return config if hasattr(config, _CLIP) else None


def _optimizers(optimizer: object) -> Iterator[Any]:
    yield optimizer
    for one in getattr(optimizer, "chained_optimizers", None) or ():
        yield from _optimizers(one)


def _followed(optimizer: Optimizer, configs: list[Any], clipping: EngineClipping) -> Callable[[], None]:
    """Wrap the optimizer's step, and return what undoes it."""
    step, own = optimizer.step, vars(optimizer).get("step")

    def stepped(*args: object, **kwargs: object) -> Any:
        threshold = clipping.threshold()
        skips = {} if math.isinf(clipping.skip_above) else {_SKIP: clipping.skip_above * threshold}
        with _set(configs, {_CLIP: threshold, **skips}):
            result = step(*args, **kwargs)
        succeeded, norm, *_ = result
        clipping.stepped(math.inf if norm is None else norm, threshold, skipped=not succeeded)
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
