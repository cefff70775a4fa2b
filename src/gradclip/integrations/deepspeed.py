"""An adaptive threshold and a record of the norms for DeepSpeed, which clips in its own step.

DeepSpeed holds the gradients in buffers of its own, so no function can clip them before the step. `follow` sets the
threshold that its engine reads at each step, and takes in the norm that the engine measured.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from gradclip._src.thresholds.holder import AdaptiveThreshold
from gradclip._src.words import with_advice
from gradclip.integrations import needed_for
from gradclip.typing import Threshold

with needed_for("deepspeed", "torch"):
    from gradclip._src.step.engine import EngineClipping

if TYPE_CHECKING:
    from gradclip._src.monitor.monitor import Monitor

__all__ = ["follow"]

_STEP = "_take_model_step"  # runs once for each update, in PipelineEngine too
_CLIP = "clip_fp32_gradients"
_METHODS = (_STEP, _CLIP, "get_global_grad_norm", "was_step_applied", "gradient_clipping", "zero_optimization")


class Engine(Protocol):
    """What `follow` uses of a DeepSpeed engine."""

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


@with_advice
def follow(
    engine: Engine, max_norm: Threshold | AdaptiveThreshold, *, monitor: "Monitor | None" = None
) -> EngineClipping:
    """Make each update of a DeepSpeed engine clip to `max_norm`, and take in the norm it measured.

    Args:
        engine: the engine, the first of what `deepspeed.initialize` returns. ZeRO stages 0 to 3, with or without
            offloading, float32, float16 and bfloat16. Its `"gradient_clipping"` no longer counts.
        max_norm: the threshold, above 0; `inf` clips nothing. Or a `gradclip.AdaptiveThreshold` without `skip_above`.
        monitor: a `gradclip.Monitor` that records the norm and the threshold of each update.

    Returns:
        An `EngineClipping`: read `.norm`, the norm before clipping at the last update; assign `.max_norm`; call
        `.remove()` to stop. To resume, save its `state_dict()` in the `client_state` of `engine.save_checkpoint`, and
        pass what `engine.load_checkpoint` returns to its `load_state_dict`.

    Raises:
        TypeError: `engine` is not a DeepSpeed engine.
        ValueError: `max_norm` is 0, which DeepSpeed takes for no clipping; `skip_above` is set, because DeepSpeed reads
            the threshold before it knows the norm; the engine is followed already, has no optimizer, does not measure
            the norm (`"compute_grad_norm": false`), or updates at other times (ZenFlow).
        RuntimeError: at an update, the ranks have different thresholds. Nothing has been changed.

    Micro-batches before an update change nothing. An update that DeepSpeed skips because of an overflow counts as
    skipped, and its norm is not observed. Call it on every rank, with equal arguments: at each update, the ranks
    compare their thresholds. If these differ by rounding, all use the smallest.

    DeepSpeed scales by max_norm / (norm + 1e-6) in the dtype of its buffers. So the norm of the result may exceed
    `max_norm` by rounding.
    """
    _check(engine)
    clipping = EngineClipping("DeepSpeed", max_norm, monitor)
    return clipping.undone_by(_followed(engine, clipping))


def _check(engine: Engine) -> None:
    if not all(hasattr(type(engine), name) for name in _METHODS):
        advice = "Pass its first entry." if isinstance(engine, tuple) else "Pass the first of what initialize returns."
        raise TypeError(
            f"engine must be a DeepSpeed engine, made by deepspeed.initialize, got {type(engine).__name__}. {advice}"
        )
    if _STEP in vars(engine):
        raise ValueError(
            "follow was already called for this engine. Assign max_norm of what it returned, or call its remove()."
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
        threshold = clipping.threshold()
        set_to(threshold, threshold if before[1] is not None else None)
        update(*args, **kwargs)
        clipping.stepped(_norm(engine), threshold, skipped=not engine.was_step_applied())

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
