"""A callback that makes the `Trainer` of Lightning clip by gradclip, and logs what clipping does.

Its own clipping must be off: leave `gradient_clip_val` out.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from gradclip._src.annotations import Integers, Meshes, Ord, ProcessGroups, StepPolicy, Threshold, UnitAxis, Where
from gradclip._src.backends.imported import needed_for
from gradclip._src.monitor.monitor import Monitor
from gradclip._src.thresholds.holder import AdaptiveThreshold
from gradclip._src.words import with_advice

with needed_for("lightning", "torch"):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch import Tensor, ones_like
    from torch.optim import Optimizer

    from gradclip._src.step.asked import Scope
    from gradclip._src.step.attach import clip_at_step
    from gradclip._src.step.engine import EngineClipping
    from gradclip._src.step.handle import StepClipping
    from gradclip._src.step.wrapped import name_parameters
    from gradclip.integrations._torch_steps import BatchIndices, StepNotes

__all__ = ["ClipCallback"]


class ClipCallback(Callback):
    """Clip at each step of each optimizer: automatic and manual optimization, mixed precision and accumulation.

    It attaches `gradclip.clip_at_step` when `fit` begins. It logs `grad_norm`, the norm before clipping,
    `grad_norm_clipped`, that of what the optimizer got, `clipped_share` and `skipped_share`, the shares of the steps of
    this run that were clipped and skipped. With several optimizers, the names end in `_0`, `_1`, and so on.

    Args:
        max_norm: as in `clip_at_step`, like the other arguments: a number or a `gradclip.AdaptiveThreshold`, whose
            history is part of Lightning's checkpoints. For several optimizers, a list may hold one for each; an
            `AdaptiveThreshold` has to be in a list, because each of them follows the norms of one optimizer.
        ord: which norm.
        scope: what is clipped: all gradients together, or each "layer", "unit" or "value"; or "agc". A step then counts
            as clipped if a layer or unit was, and `clipped_layer_share` or `clipped_unit_share` is the share of them
            that the step clipped. "agc" logs `grad_norm` alone, "value" nothing.
        eps: the lower limit for the norm of weights, with `scope="agc"`.
        unit_axis: the axes that index units, with `scope="unit"` or `"agc"`.
        nonfinite: what to do if a gradient contains NaN or infinity.
        process_group: the processes that hold different gradients.
        mesh: the same, given as a mesh.
        where: the gradients that count, by the names that the module gives its parameters.
        integers: "raise" refuses integers in place of gradients.
        monitor: a `gradclip.Monitor` that records each step; for several optimizers, a list with one for each. It gets
            the step's number, `trainer.global_step`, the module's names of layers, the loss, and as context the indices
            of the step's examples in the data set of `trainer.train_dataloader`, in a list; without any, as of a
            stream, None. Each process has the loss and the examples of its own. In manual optimization, they are those
            of the calls of `manual_backward` that reached the optimizer's parameters since its last step or
            `zero_grad()`. If something else wrote to the gradients between two such calls, as
            `zero_grad(set_to_none=False)` does, there are none.
        context: what to record in their place: a function of a batch, such as `lambda batch: batch["id"]`. The context
            is then a list with what it returns for each batch of the step.

    Attributes:
        clipping: what `clip_at_step` returned for each optimizer of the last `fit`.

    Raises:
        ValueError: a `context` without a monitor; when `fit` begins, if the Trainer clips, too, or a list does not fit
            the optimizers. TypeError: an engine such as DeepSpeed steps.
        UserWarning: the module has a `configure_gradient_clipping` of its own, which is called at each step.

    """

    @with_advice
    def __init__(
        self,
        max_norm: Threshold | AdaptiveThreshold | Sequence[Threshold | AdaptiveThreshold],
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
        monitor: Monitor | Sequence[Monitor] | None = None,
        context: Callable[[Any], Any] | None = None,
    ) -> None:
        self._max_norm, self._monitor = max_norm, monitor
        self._same: dict[str, Any] = {"ord": ord, "scope": scope, "eps": eps, "nonfinite": nonfinite}
        self._same |= {"process_group": process_group, "mesh": mesh, "unit_axis": unit_axis}
        self._same |= {"where": where, "integers": integers}
        self.clipping: list[StepClipping | EngineClipping] = []
        self._context, self._notes = context, StepNotes(context, monitor)
        self._each: list[tuple[Optimizer, Monitor, StepNotes]] = []
        self._batch: list[Any] | None = None  # what tells it from others
        self._loss: Tensor | None = None
        self._place = 0  # of the next batch in this pass through the data
        self._followed: list[tuple[Any, BatchIndices]] = []
        self._undo = ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check_alone(trainer, pl_module)
        while self.clipping:
            self.clipping.pop().remove()  # of an earlier fit
        self._undo.close()
        optimizers = trainer.optimizers
        monitors = _each("monitor", self._monitor, len(optimizers), shared=self._monitor is None)
        adaptive = isinstance(self._max_norm, AdaptiveThreshold)
        max_norms = _each("max_norm", self._max_norm, len(optimizers), shared=not adaptive)
        if self._monitor is not None and "dataloader_iter" not in inspect.signature(pl_module.training_step).parameters:
            self._follow(trainer)
        for optimizer, max_norm, monitor in zip(optimizers, max_norms, monitors, strict=True):
            name_parameters(optimizer, pl_module.named_parameters())
            self.clipping.append(clip_at_step(optimizer, max_norm, monitor=monitor, **self._same))
        automatic = pl_module.automatic_optimization
        self._each = [
            (optimizer, monitor, StepNotes(self._context, monitor, None if automatic else optimizer))
            for optimizer, monitor in zip(optimizers, monitors, strict=True)
            if monitor is not None
        ]

    def _follow(self, trainer: Trainer) -> None:
        """Follow which examples the batches of the loaders hold that Lightning will make."""
        prepared = trainer.strategy.process_dataloader

        def followed(loader: object) -> object:
            found = prepared(loader)
            if trainer.training and (indices := BatchIndices.of(loader)) is not None:
                self._followed.append((found, indices))
                self._undo.callback(indices.stop)
            return found

        trainer.strategy.process_dataloader = followed
        self._undo.callback(vars(trainer.strategy).pop, "process_dataloader")

    def _end(self, *_: object) -> None:
        self._undo.close()
        self._followed.clear()

    on_fit_end = on_exception = _end

    def _indices(self, trainer: Trainer) -> BatchIndices | None:
        loader = trainer.train_dataloader
        return next((indices for found, indices in self._followed if found is loader), None)

    def on_train_start(self, *_: object) -> None:
        self._place = 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._place = 0
        if (indices := self._indices(trainer)) is not None:
            indices.begin()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._monitor is not None:
            indices = self._indices(trainer)
            self._batch = self._notes.of_batch(batch, None if indices is None else indices.batch(self._place))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if self._each:
            self._loss = (loss if scaler is None else loss / scaler.scale(ones_like(loss))).detach()
        for each in self._each:
            each[2].before_backward()

    def on_after_backward(self, *_: object) -> None:
        for each in self._each:
            each[2].after_backward(self._loss, self._batch)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        for one, monitor, notes in self._each:
            if one is optimizer:
                loss, context = notes.take()
                monitor.note(step=trainer.global_step + 1, loss=loss, context=context)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        self._place += 1
        several = len(self.clipping) > 1
        for number, one in enumerate(self.clipping):
            end = f"_{number}" if several else ""
            pl_module.log_dict({f"{name}{end}": value for name, value in one.numbers().items()}, on_step=True)


def _each(name: str, given: object, count: int, *, shared: bool) -> Sequence[Any]:
    """Return what was given for each optimizer."""
    if isinstance(given, list | tuple):
        if len(given) == count:
            return given
        raise ValueError(f"{name} must hold one entry for each optimizer, got {len(given)} for {count} of them.")
    if shared or count == 1:
        return [given] * count
    kind = type(given).__name__
    raise ValueError(
        f"one {kind} would follow the norms of {count} optimizers mixed together. Pass a list with one for each: "
        f"{name}=[{', '.join([f'{kind}()'] * count)}]."
    )


def _check_alone(trainer: Trainer, module: LightningModule) -> None:
    if trainer.gradient_clip_val:
        raise ValueError(
            f"Lightning would clip, too, before ClipCallback measures: Trainer(gradient_clip_val="
            f"{trainer.gradient_clip_val}). Leave gradient_clip_val out."
        )
    kind = type(module)
    if kind.configure_gradient_clipping is not LightningModule.configure_gradient_clipping:
        warnings.warn(
            f"{kind.__name__}.configure_gradient_clipping is called at each step, too, before ClipCallback measures. "
            "Remove it if it clips.",
            UserWarning,
            stacklevel=2,
        )
