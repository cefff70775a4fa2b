"""A callback that makes the `Trainer` of Hugging Face transformers clip by gradclip, and logs what clipping does.

Its own clipping must be off: pass `max_grad_norm=0.0` to `TrainingArguments`, whose default is 1.0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from gradclip._src.annotations import Integers, Meshes, Ord, ProcessGroups, StepPolicy, Threshold, UnitAxis, Where
from gradclip._src.backends.imported import needed_for
from gradclip._src.monitor.monitor import Monitor
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.thresholds.holder import AdaptiveThreshold
from gradclip._src.words import with_advice

with needed_for("transformers", "torch"):
    from accelerate.data_loader import DataLoaderShard
    from torch.nn import Module
    from torch.optim import Optimizer
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState

    from gradclip._src.step.asked import Scope
    from gradclip._src.step.attach import clip_at_step
    from gradclip._src.step.engine import EngineClipping
    from gradclip._src.step.handle import StepClipping
    from gradclip._src.step.wrapped import name_parameters
    from gradclip.integrations._torch_steps import BatchIndices, StepNotes

__all__ = ["ClipCallback"]

_NOT_IN_JSON = "what the checkpoint of a Trainer cannot hold"


class ClipCallback(TrainerCallback, ExportableState):
    """Clip at each step of a `Trainer`, whatever the optimizer: mixed precision and accumulation included.

    It attaches `gradclip.clip_at_step` when training begins. When the Trainer logs, it adds
    `grad_norm`, the norm before clipping, `grad_norm_clipped`, that of what the optimizer got, `clipped_share` and
    `skipped_share`, the shares of the steps of this run that were clipped and skipped.

    Args:
        max_norm: as in `clip_at_step`, like the other arguments: a number or a `gradclip.AdaptiveThreshold`, whose
            history is part of the Trainer's checkpoints.
        ord: which norm.
        scope: what is clipped: all gradients together, or each "layer", "unit" or "value"; or "agc". A step then counts
            as clipped if a layer or unit was, and `clipped_layer_share` or `clipped_unit_share` is the share of them
            that the step clipped. "agc" logs `grad_norm` alone, "value" nothing.
        eps: the lower limit for the norm of weights, with `scope="agc"`.
        unit_axis: the axes that index units, with `scope="unit"` or `"agc"`.
        nonfinite: what to do if a gradient contains NaN or infinity.
        process_group: the processes that hold different gradients.
        mesh: the same, given as a mesh.
        where: the gradients that count, by the names that the model gives its parameters.
        integers: "raise" refuses integers in place of gradients.
        monitor: a `gradclip.Monitor` that records each step, under the Trainer's number of it, with the model's names
            of layers. After `add_to`, also the loss, and as context the indices of the step's examples in the data set
            of the Trainer's data loader, in a list; without any, as of a stream, None. Each process has the loss and
            the examples of its own.
        context: what to record in their place: a function of a batch, such as `lambda batch: batch["id"]`. The context
            is then a list with what it returns for each batch of the step. It needs `add_to`.

    Attributes:
        clipping: what `clip_at_step` returned; None before training.

    Raises:
        ValueError: the Trainer clips, too; a `context` without a monitor; `restore_callback_states_from_checkpoint`
            would replace a callback with a `gradclip.AdaptiveThreshold`, a monitor, processes or a function as `where`,
            which no checkpoint can hold. TypeError: an engine such as DeepSpeed steps.

    Write `ClipCallback(1.0).add_to(trainer)`, so that loggers such as TensorBoard and Weights & Biases, which the
    Trainer calls first, get these numbers, too. Passed as `callbacks=[ClipCallback(1.0)]`, only the Trainer's own
    `log_history` and later callbacks get them.

    """

    @with_advice
    def __init__(
        self,
        max_norm: Threshold | AdaptiveThreshold,
        ord: Ord = 2,
        *,
        scope: Scope = "global",
        eps: Threshold | None = None,
        unit_axis: UnitAxis = None,
        nonfinite: StepPolicy = "propagate",
        process_group: ProcessGroups = None,
        mesh: Meshes = None,
        where: Where = None,
        integers: Integers = "keep",
        monitor: Monitor | None = None,
        context: Callable[[Any], Any] | None = None,
    ) -> None:
        if isinstance(max_norm, str) and max_norm == _NOT_IN_JSON:
            raise ValueError(
                "restore_callback_states_from_checkpoint=True makes callbacks again from the checkpoint, which cannot "
                "hold an AdaptiveThreshold, a monitor, processes or a function. Leave it out: ClipCallback goes on "
                "where it was anyway."
            )
        self._max_norm = max_norm if isinstance(max_norm, AdaptiveThreshold) else check_threshold(max_norm)
        self._plain: dict[str, Any] = {"ord": ord, "scope": scope, "eps": eps, "nonfinite": nonfinite}
        self._plain |= {"unit_axis": unit_axis, "integers": integers}
        self._more: dict[str, Any] = {"process_group": process_group, "mesh": mesh, "monitor": monitor}
        (self._more if callable(where) else self._plain)["where"] = where
        self.clipping: StepClipping | EngineClipping | None = None
        self._notes = StepNotes(context, monitor)
        self._indices: BatchIndices | None = None
        self._place, self._begins_at = 0, 0  # of the next batch in this pass through the data; of the first in the next

    def add_to(self, trainer: Trainer) -> ClipCallback:
        """Add this callback to a Trainer, before the callbacks that report. Return it."""
        _check_alone(trainer.args)
        trainer.callback_handler.callbacks.insert(0, self)
        if self._more["monitor"] is not None:
            trainer.training_step = self._noting(trainer)
        return self

    def _noting(self, trainer: Trainer) -> Callable[..., Any]:
        """Return a Trainer's step for one batch, which then also notes the batch and its loss."""
        plain, notes = trainer.training_step, self._notes
        in_order = type(trainer).get_batch_samples is Trainer.get_batch_samples

        @wraps(plain)
        def training_step(model: Module, inputs: object, *args: Any, **kwargs: Any) -> Any:
            indices = self._indices.batch(self._place) if self._indices is not None and in_order else None
            told = notes.of_batch(inputs, indices)
            loss = plain(model, inputs, *args, **kwargs)
            self._place += 1
            notes.add(loss, told)
            return loss

        return training_step

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        _check_alone(args)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Optimizer = None,
        model: Module = None,
        train_dataloader: object = None,
        **_: object,
    ) -> None:
        _check_alone(args)
        if self.clipping is not None:
            self.clipping.remove()  # of an earlier training
        name_parameters(optimizer, model.named_parameters())
        self._follow(args, state, train_dataloader)
        self.clipping = clip_at_step(optimizer, self._max_norm, **self._plain, **self._more)
        # A checkpoint that was saved without this callback has no state of it, and the Trainer needs one to save.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if isinstance(saved, dict):
            self.clipping.load_state_dict(saved["attributes"]["saved"])

    def _follow(self, args: TrainingArguments, state: TrainerState, loader: Any) -> None:
        """Follow which examples the batches hold."""
        self.on_train_end()
        skipped = _skipped(args, state, loader)
        if self._more["monitor"] is not None and skipped is not None:
            shard = isinstance(loader, DataLoaderShard)
            self._indices, self._begins_at = BatchIndices.of(loader.base_dataloader if shard else loader), skipped

    def on_epoch_begin(self, *_: object, **__: object) -> None:
        self._place, self._begins_at = self._begins_at, 0

    def on_epoch_end(self, *_: object, **__: object) -> None:
        if self._indices is not None:
            self._indices.begin()

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._notes.begin()

    def on_pre_optimizer_step(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        if (monitor := self._more["monitor"]) is not None:
            monitor.note(step=state.global_step + 1, loss=self._notes.loss, context=self._notes.context)

    def on_train_end(self, *_: object, **__: object) -> None:
        if self._indices is not None:
            self._indices.stop()
        self._indices = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        # It is also called for evaluations, and at the end of training.
        if self.clipping is None or logs is None or "loss" not in logs:
            return
        numbers = {name: float(number) for name, number in self.clipping.numbers().items()}
        logs.update(numbers)
        if state.log_history:
            state.log_history[-1].update(numbers)

    def state(self) -> dict[str, Any]:
        """Return what the Trainer saves in its checkpoints."""
        if isinstance(self._max_norm, AdaptiveThreshold):
            saved = {"max_norm": self._max_norm.state_dict()}
            return {"args": {"max_norm": _NOT_IN_JSON}, "attributes": {"saved": saved}}
        alone = all(one is None for one in self._more.values())
        args = {"max_norm": float(self._max_norm), **self._plain} if alone else {"max_norm": _NOT_IN_JSON}
        return {"args": args, "attributes": {"saved": {}}}


def _skipped(args: TrainingArguments, state: TrainerState, loader: Any) -> int | None:
    """Return how many batches a resumed Trainer passes over; None if its state is not of batches such as these."""
    if state.global_step == 0 or args.ignore_data_skip:
        return 0
    try:
        batches = len(loader)
    except TypeError:
        return None
    accumulated = args.gradient_accumulation_steps
    skipped = state.global_step % max(-(-batches // accumulated), 1) * accumulated
    return skipped if skipped == round(state.epoch % 1 * batches) else None


def _check_alone(args: TrainingArguments) -> None:
    if args.max_grad_norm is not None and args.max_grad_norm > 0:
        raise ValueError(
            f"the Trainer would clip, too, before ClipCallback measures: max_grad_norm is {args.max_grad_norm}, by "
            "default 1.0. Switch it off: TrainingArguments(..., max_grad_norm=0.0)."
        )
