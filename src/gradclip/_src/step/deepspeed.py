"""DeepSpeed's engines, which hold the gradients in buffers of their own and clip in their own step.

No function can clip those before the step. So each update sets the threshold that the engine reads, and takes in the
norm that the engine measured.
"""

from collections.abc import Callable
from typing import Any, Protocol

from gradclip._src.annotations import Threshold
from gradclip._src.monitor.monitor import Monitor
from gradclip._src.step.engine import EngineClipping
from gradclip._src.thresholds.holder import AdaptiveThreshold

_STEP = "_take_model_step"  # runs once for each update, in PipelineEngine too
_CLIP = "clip_fp32_gradients"


class Engine(Protocol):
    """What is used of a DeepSpeed engine."""

    optimizer: Any
    module: Any
    mpu: Any
    _config: Any
    _global_grad_norm: Any

    def gradient_clipping(self) -> float: ...

    def get_global_grad_norm(self) -> Any: ...

    def was_step_applied(self) -> bool: ...

    def zero_optimization(self) -> bool: ...

    def fp16_enabled(self) -> bool: ...

    def bfloat16_enabled(self) -> bool: ...


def attach(engine: Engine, max_norm: Threshold | AdaptiveThreshold, monitor: "Monitor | None") -> EngineClipping:
    """Make each update of a DeepSpeed engine clip, as `clip_at_step` says."""
    _check(engine)
    clipping = EngineClipping(engine, "DeepSpeed", max_norm, monitor)
    return clipping._undone_by(_followed(engine, clipping))


def _check(engine: Engine) -> None:
    if _STEP in vars(engine):
        raise ValueError(
            "the updates of this engine clip already: clip_at_step was already called for it. Assign max_norm of what "
            "it returned, or call its remove() first."
        )
    optimizer = engine.optimizer
    if optimizer is None or not hasattr(optimizer, "step"):
        raise ValueError("the engine has no optimizer, so it never clips. Pass one to deepspeed.initialize.")
    if getattr(engine, "zenflow", False):
        raise ValueError("the engine uses ZenFlow, which also updates parameters outside its steps. Use plain ZeRO.")
    if not getattr(optimizer, "compute_grad_norm", True):
        raise ValueError(
            'the engine does not measure the norm, so it cannot clip. Leave "compute_grad_norm": false out of '
            '"zero_optimization".'
        )
    if _holds(engine) and not hasattr(optimizer, "clip_grad"):
        raise ValueError(f"{type(optimizer).__name__} has no clip_grad, so its threshold cannot be set.")


def _holds(engine: Engine) -> bool:
    """Say whether the engine's optimizer holds the gradients; else they are in `.grad`, and the engine clips."""
    return bool(engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled())


def _followed(engine: Engine, clipping: EngineClipping) -> Callable[[], None]:
    """Wrap the engine's update, and return what undoes it."""
    update, optimizer, config = getattr(engine, _STEP), engine.optimizer, engine._config
    before = config.gradient_clipping, getattr(optimizer, "clip_grad", None)

    def set_to(threshold: float, own: float | None) -> None:
        config.gradient_clipping = threshold
        if own is not None:
            optimizer.clip_grad = own

    def updated(*args: object, **kwargs: object) -> None:
        threshold = clipping._next_threshold()
        set_to(threshold, threshold if before[1] is not None else None)
        update(*args, **kwargs)
        clipping._stepped(_norm(engine), threshold, skipped=not engine.was_step_applied())

    def clip() -> None:
        from deepspeed.runtime.utils import clip_grad_norm_

        norm = clip_grad_norm_(engine.module.parameters(), engine.gradient_clipping(), mpu=engine.mpu)
        engine._global_grad_norm = float(norm)  # the engine's own function drops it

    setattr(engine, _STEP, updated)
    if not _holds(engine):
        setattr(engine, _CLIP, clip)

    def undo() -> None:
        set_to(*before)
        for name in {_STEP, _CLIP} & vars(engine).keys():
            delattr(engine, name)

    return undo


def _norm(engine: Engine) -> Any:
    """Return the norm of the last update, of gradients without the loss scale."""
    norm = engine.get_global_grad_norm()
    if norm is None:
        raise RuntimeError("DeepSpeed has not measured the norm of this update, so the threshold cannot follow it.")
    if type(engine.optimizer).__name__ == "FP16_UnfusedOptimizer":  # the only one that gives it with the loss scale
        return norm / engine.optimizer.loss_scale_config.cur_scale
    return norm
