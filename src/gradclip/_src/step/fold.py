"""Clip within the step of a fused PyTorch optimizer, which divides the gradients as it reads them.

A hook before the step measures the norm. It sets `optimizer.grad_scale`, by which the fused kernels divide, and
`optimizer.found_inf`, which makes them skip the step. A hook after the step restores both.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from gradclip._src.core.nonfinite import DROP, Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.distributed.processes import processes_of, telling
from gradclip._src.monitor.monitor import Monitor
from gradclip._src.passed.arguments import check_monitor
from gradclip._src.passed.parameters import ParameterList
from gradclip._src.step.handle import StepClipping, StepPart, check_free, check_unclipped
from gradclip._src.step.within import (
    OF_SCALER,
    Guard,
    MeasuredStep,
    Request,
    check_fused,
    check_listed_once,
    checked,
    clear_momentum,
    forget_scaler,
    lay_out_gradients,
    without_momentum,
)
from gradclip._src.step.wrapped import parameters_of
from gradclip._src.thresholds.holder import AdaptiveThreshold
from gradclip._src.words import with_advice
from gradclip.typing import Meshes, Ord, ProcessGroups, StepPolicy, Threshold


class FusedClipping(StepClipping):
    """Clipping within the steps of one fused optimizer, until `remove()`."""

    def __init__(
        self,
        optimizer: Optimizer,
        max_norm: Threshold | AdaptiveThreshold,
        request: Request,
        monitor: Monitor | None = None,
    ) -> None:
        super().__init__(optimizer, max_norm, request, monitor)
        self._before: dict[str, torch.Tensor | None] | None = None
        self._without_momentum: list[torch.Tensor] = []
        self._measured_last: MeasuredStep | None = None
        self._hooks.append(optimizer.register_step_post_hook(torch.compiler.disable(self._end)))
        self._guard = Guard(optimizer, self._failed)

    def _detached(self) -> None:
        super()._detached()
        self._restore(self._optimizer)
        self._guard.remove(self._optimizer)

    # The step

    def _checked(self, max_norm: Threshold) -> float:
        return float(checked(max_norm))  # type: ignore[arg-type]

    def _clip(self, optimizer: Optimizer, kwargs: Mapping[str, Any]) -> None:
        self._restore(optimizer)
        given = {name: value for name, value in vars(optimizer).items() if name in OF_SCALER}
        found_inf = given.get("found_inf") if self._scaled is None else given.get("found_inf", self._scaled.found())
        if isinstance(found_inf, int):  # the GradScaler's sum over no gradients
            found_inf = torch.zeros(())
        each = None if self._monitor is None or not self._request.alone else self._monitor.watching()
        try:
            scale = given.get("grad_scale")
            measured = self._request.measured(optimizer, self._max_norm, scale, found_inf, each)
        except BaseException as error:
            self._failed(optimizer)
            if self._monitor is not None and isinstance(error, FloatingPointError):
                self._monitor.missed(each)
            raise
        lay_out_gradients(optimizer)
        self.norm, self._before, self._measured_last = measured.norm, given, measured
        if measured.grad_scale is not None:
            optimizer.grad_scale = measured.grad_scale
        if measured.found_inf is not None:
            optimizer.found_inf = measured.found_inf
            self._without_momentum = without_momentum(optimizer)

    def _end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._without_momentum:
            clear_momentum(optimizer, self._without_momentum, vars(optimizer)["found_inf"] == 1.0)
        last = self._measured_last
        self._restore(optimizer)
        if last is None:
            return
        scaled, request = last.overflow is not None, self._request
        if self._scaled is not None and last.overflow is not None:
            self._scaled.overflowed(last.overflow)
        if last.shown is not None and isinstance(self._max_norm, AdaptiveThreshold):
            self._max_norm._observe(last.norm, last.max_norm, request.order, request.nonfinite, last.shown)
        self._stepped(last.norm, [StepPart.of(last.norm, self._max_norm, last.max_norm)])
        if self._monitor is not None:
            self._monitor.watched(last.each)
            # GradScaler skips what is not finite.
            policy = (DROP if scaled else request.nonfinite).name
            self._monitor.record(last.norm, self._max_norm, nonfinite=policy)

    def _skip(self) -> None:
        super()._skip()
        self._without_momentum = []  # no step makes it
        self._end(self._optimizer, (), {})

    def _failed(self, optimizer: Optimizer) -> None:
        """Restore the attributes after an error, and remove those of a GradScaler."""
        self._restore(optimizer)
        forget_scaler(optimizer)

    def _restore(self, optimizer: Optimizer) -> None:
        """Restore the attributes: GradScaler deletes those it has set, and other callers raise if they find them."""
        self._without_momentum, self._measured_last = [], None
        before, self._before = self._before, None
        if before is None:
            return
        for name in OF_SCALER:
            vars(optimizer).pop(name, None)
        vars(optimizer).update(before)


@with_advice
def fold_into(
    optimizer: Optimizer,
    max_norm: Threshold | AdaptiveThreshold,
    ord: Ord | Order = 2,
    *,
    nonfinite: StepPolicy = "propagate",
    process_group: ProcessGroups = None,
    mesh: Meshes = None,
    monitor: Monitor | None = None,
) -> FusedClipping:
    """Make each `optimizer.step()` clip the gradients of all its parameters together, without an extra pass over them.

    The step measures the norm N, and the optimizer divides every gradient by max(1, N / max_norm) as it reads it.

    Args:
        optimizer: Adam, AdamW, SGD or Adagrad of PyTorch, created with `fused=True`. Two optimizers clip separately:
            with the thresholds C1 and C2, their gradients together have a norm of at most sqrt(C1**2 + C2**2).
        max_norm: the threshold in the units of unscaled gradients: 0, inf, or from 2**-50 to 2**100. Or a
            `gradclip.AdaptiveThreshold`; its thresholds are kept within that range. A step that its `skip_above` skips
            leaves parameters and optimizer state unchanged.
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: what to do if a gradient contains NaN or infinity. "propagate": all gradients become NaN. "raise": an
            error before the step; every step then waits for the device. "skip": the step leaves parameters and state
            unchanged. "zero" is refused. GradScaler always skips these steps, whatever you pass here.
        process_group: as in `gradclip.clip_grad_norm_`, if each process holds different parameters. All of them must
            call `fold_into`, and step together.
        mesh: the same, given as a mesh.
        monitor: a `gradclip.Monitor` that records the norm and the threshold after each step.

    Returns:
        A `FusedClipping`: read `.norm`, the norm before clipping at the last step; assign `.max_norm`; call `.remove()`
        to stop.

    Raises:
        TypeError: the optimizer is not one of those above.
        ValueError: the optimizer was created without `fused=True`, or is folded already; the threshold is out of range;
            `nonfinite="zero"`, which needs an extra pass over the gradients.
        RuntimeError: this call or a step failed on another process.
        FloatingPointError: at a step with `nonfinite="raise"`, the gradients contain NaN or infinity.

    A step may also raise the errors of `gradclip.clip_grad_norm_`. After an error at a step, the parameters are
    unchanged.

    The gradients that the update uses have a norm of at most `max_norm`, in exact arithmetic, for float32 and float64
    parameters. The optimizer also stores them in `.grad`. For half types, the update uses float32 quotients, for which
    the bound holds; `.grad` gets them rounded to nearest. `step/within.py` has the proof.

    With GradScaler, call `scaler.step(optimizer)`, with or without `scaler.unscale_(optimizer)` before it. If it finds
    infinities on one process, all skip the step and lower their scales. All processes must start with the same scale.

    The history of an `AdaptiveThreshold` is saved in the optimizer's `state_dict`, under "gradclip", and loaded from
    there. The clipping itself is not: for a new optimizer, call `fold_into` before you load its state.

    Folding uses the attributes `grad_scale` and `found_inf` of fused optimizers, which `torch.amp.GradScaler` sets in
    PyTorch 2.13.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    >>> clipping = fold_into(optimizer, max_norm=1.0)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> optimizer.step()
    >>> clipping.norm, weight.detach()
    (tensor(5.), tensor([-0.6000, -0.8000]))

    """
    listed = getattr(optimizer, "param_groups", ())
    with telling(listed, process_group, mesh):
        params = ParameterList.of(listed)
    processes = processes_of(params, process_group, mesh)
    with processes.agreeing():
        request = Request(Order.parse(ord), Nonfinite.of_steps(nonfinite), process_group, mesh)
        _check_foldable(optimizer, request.nonfinite)
        check_unclipped(optimizer)
        if monitor is not None:
            check_monitor(monitor)
        for given in (monitor, max_norm, *(group.get("max_norm") for group in optimizer.param_groups)):
            check_free(given, parameters_of(optimizer))
        request.ask(processes, checked(max_norm))
    return FusedClipping(optimizer, max_norm, request, monitor)


def _check_foldable(optimizer: Optimizer, policy: Nonfinite) -> None:
    if policy.zeroes:
        raise ValueError(
            "fold_into does not support nonfinite='zero', which must write the gradients before the step. Pass "
            "nonfinite='skip', or call gradclip.clip_grad_norm_(..., nonfinite='zero') before optimizer.step()."
        )
    check_fused(optimizer)
    check_listed_once(optimizer)
