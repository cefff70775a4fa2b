"""Clip within the step of a fused PyTorch optimizer, which divides the gradients as it reads them.

A hook before the step measures the norm. It sets `optimizer.grad_scale`, by which the fused kernels divide, and
`optimizer.found_inf`, which makes them skip the step. A hook after the step restores both.
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from gradclip.adaptive.holder import AdaptiveNorm
from gradclip.arguments import check_threshold
from gradclip.arithmetic import ordinary_arithmetic
from gradclip.backends import Backend
from gradclip.backends.torch.optimizers import Guard, check_fused, clear_momentum, without_momentum
from gradclip.backends.torch.tensors import tensor_of
from gradclip.core.decide import Clipping, decide
from gradclip.core.divisor import check_foldable, divisor, threshold_of_scaled, within_range
from gradclip.core.nonfinite import PROPAGATE, Nonfinite
from gradclip.core.norms import Order
from gradclip.core.rules import CLIP
from gradclip.distributed.processes import processes_of
from gradclip.inplace.gradients import Gradients, entered
from gradclip.parameters import ParameterList
from gradclip.typing import Meshes, Ord, Policy, ProcessGroups, Scalar, Threshold

_FOLDED: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


@dataclass(frozen=True)
class Measured:
    """The data for one step: norm before clipping, threshold, divisor, and a tensor that is 1.0 to skip the step.

    A divisor of None is known to be 1: given a divisor, the kernels would write every gradient.
    """

    norm: torch.Tensor
    max_norm: Scalar
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None


class Folded:
    """Clipping within the steps of one optimizer, until `remove()`.

    Attributes:
        norm: the norm of the unscaled gradients before clipping, at the last step; None before the first step.
        max_norm: the threshold, or the `AdaptiveNorm` that sets it. You may assign a new one; it applies from the next
            step on.

    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_norm: Threshold | AdaptiveNorm,
        order: Order,
        nonfinite: Nonfinite,
        groups: tuple[Any, Any],
    ) -> None:
        self.max_norm = max_norm
        self.norm: torch.Tensor | None = None
        self._order, self._nonfinite, self._groups = order, nonfinite, groups
        self._before: dict[str, torch.Tensor | None] | None = None
        self._without_momentum: list[torch.Tensor] = []
        self._measured_last: Measured | None = None
        self._optimizer = optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]
        self._guard = Guard(optimizer, self._restore)
        _FOLDED.add(optimizer)

    @property
    def max_norm(self) -> float | AdaptiveNorm:
        """The threshold, or the `AdaptiveNorm` that sets it."""
        return self._max_norm

    @max_norm.setter
    def max_norm(self, value: Threshold | AdaptiveNorm) -> None:
        if isinstance(value, AdaptiveNorm):
            self._max_norm: float | AdaptiveNorm = value
            return
        number = check_threshold(value)
        self._max_norm = check_foldable(number if isinstance(number, float) else float(number))

    def remove(self) -> None:
        """Stop clipping: from the next step on, the optimizer gets the gradients unchanged."""
        for hook in self._hooks:
            hook.remove()
        self._restore(self._optimizer)
        self._guard.remove(self._optimizer)
        _FOLDED.discard(self._optimizer)

    # The step

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure before the step; if a closure computes the gradients, measure after the closure."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._fold(optimizer)
            return None

        def measured_after() -> Any:
            loss = closure()
            self._fold(optimizer)
            return loss

        return (args[0],), {**kwargs, "closure": measured_after}

    def _fold(self, optimizer: Optimizer) -> None:
        check_fused(optimizer)
        self._restore(optimizer)
        given = {name: value for name, value in vars(optimizer).items() if name in ("grad_scale", "found_inf")}
        measured = self._measured(optimizer, given.get("grad_scale"), given.get("found_inf"))
        self.norm, self._before, self._measured_last = measured.norm, given, measured
        if measured.grad_scale is not None:
            optimizer.grad_scale = measured.grad_scale
        if measured.found_inf is not None:
            optimizer.found_inf = measured.found_inf
            self._without_momentum = without_momentum(optimizer)

    @ordinary_arithmetic
    def _measured(self, optimizer: Optimizer, scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> Measured:
        params = ParameterList.of(optimizer.param_groups)
        processes = processes_of(params, *self._groups)
        follows = self._max_norm if isinstance(self._max_norm, AdaptiveNorm) else None
        max_norm: Scalar = self._max_norm if follows is None else follows.for_order(self._order)
        # A step that GradScaler skips is not an error: the scale was too large.
        skips = self._nonfinite.raises and found_inf is not None and bool(found_inf.item())
        policy = PROPAGATE if skips else self._nonfinite
        with processes.preparing():
            processes.ask(self._order, self._nonfinite, max_norm)
            scalars = () if scale is None else (scale,)
            # The optimizer divides each gradient where it lies, so memory that two share would be divided twice.
            gradients, backend, arrays = entered(params, processes, *scalars, to_write=True, apart=True)
        holders = processes.holders(backend)
        with backend.precision():
            given = backend.scalar(1.0 if scale is None else scale, arrays)
            if follows is not None:
                max_norm = within_range(backend, backend.scalar(max_norm, arrays))
            threshold = threshold_of_scaled(backend, max_norm, given)
            clipping = Clipping(threshold, self._order, PROPAGATE if policy.blanks else policy, CLIP)
            made = decide(backend, arrays, clipping, gradients.names, holders=holders, at_once=False)
            by = divisor(backend, made.coefficient, given)
            as_they_are = scale is None and backend.concrete and by == 1.0
            norm = _left(backend, made.norm.product() / given, gradients, holders.norm_dtype(arrays))
            flags = []
            if policy.blanks:
                nonfinite = backend.xp.logical_not(backend.xp.isfinite(made.norm.value))
                flags.append(_left(backend, nonfinite, gradients))
            if follows is not None and follows.skip_above < math.inf:
                flags.append(torch.as_tensor(follows.is_spike(norm, max_norm), device=norm.device).float())
            grad_scale = None if as_they_are else _left(backend, by, gradients)
            gradients.separate(backend)
            return Measured(norm, max_norm, grad_scale, _skipping(found_inf, flags))

    def _end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._without_momentum:
            clear_momentum(optimizer, self._without_momentum, vars(optimizer)["found_inf"] == 1.0)
        last = self._measured_last
        self._restore(optimizer)
        if last is not None and isinstance(self._max_norm, AdaptiveNorm):
            self._max_norm.observe(last.norm, last.max_norm, self._order, self._nonfinite)

    def _restore(self, optimizer: Optimizer) -> None:
        """Restore the attributes: GradScaler deletes those it has set, and other callers raise if they find them."""
        self._without_momentum, self._measured_last = [], None
        before, self._before = self._before, None
        if before is None:
            return
        for name in ("grad_scale", "found_inf"):
            vars(optimizer).pop(name, None)
        vars(optimizer).update(before)


def fold_into(
    optimizer: Optimizer,
    max_norm: Threshold | AdaptiveNorm,
    ord: Ord | Order = 2,
    *,
    nonfinite: Policy = "propagate",
    process_group: ProcessGroups = None,
    mesh: Meshes = None,
) -> Folded:
    """Make each `optimizer.step()` clip the gradients of all its parameters together, without an extra pass over them.

    The step measures the norm N, and the optimizer divides every gradient by max(1, N / max_norm) as it reads it.

    Args:
        optimizer: Adam, AdamW, SGD or Adagrad of PyTorch, created with `fused=True`. Two optimizers clip separately:
            with the thresholds C1 and C2, their gradients together have a norm of at most sqrt(C1**2 + C2**2).
        max_norm: the threshold in the units of unscaled gradients: 0, inf, or from 2**-50 to 2**100. Or a
            `gradclip.AdaptiveNorm`; its thresholds are kept within that range. A step that its `skip_above` skips
            leaves parameters and optimizer state unchanged.
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: what to do if a gradient contains NaN or infinity. "propagate": all gradients become NaN. "raise": an
            error before the step; every step then waits for the device. "skip": the step leaves parameters and state
            unchanged. GradScaler always skips these steps, whatever you pass here.
        process_group: as in `gradclip.clip_grad_norm_`, if each process holds different parameters.
        mesh: the same, given as a mesh.

    Returns:
        A `Folded`: read `.norm`, the norm before clipping at the last step; assign `.max_norm`; call `.remove()` to
        stop.

    Raises:
        TypeError: the optimizer is not one of those above.
        ValueError: the optimizer was created without `fused=True`, or is folded already; the threshold is out of range;
            `nonfinite="zero"`, which needs an extra pass over the gradients.
        FloatingPointError: at a step with `nonfinite="raise"`, the gradients contain NaN or infinity.

    A step may also raise the errors of `gradclip.clip_grad_norm_`. After an error at a step, the parameters are
    unchanged.

    The gradients that the update uses have a norm of at most `max_norm`, in exact arithmetic, for float32 and float64
    parameters. The optimizer also stores them in `.grad`. For half types, the update uses float32 quotients, for which
    the bound holds; `.grad` gets them rounded to nearest. `gradclip.core.divisor` has the proof.

    With GradScaler, call `scaler.step(optimizer)`, with or without `scaler.unscale_(optimizer)` before it. The clipping
    is not part of `state_dict`: when you load a checkpoint into a new optimizer, call `fold_into` again.

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
    policy = Nonfinite.named(nonfinite)
    if policy.zeroes:
        raise ValueError(
            "fold_into does not support nonfinite='zero', which must write the gradients before the step. Pass "
            "nonfinite='skip', or call gradclip.clip_grad_norm_(..., nonfinite='zero') before optimizer.step()."
        )
    check_fused(optimizer)
    if optimizer in _FOLDED:
        raise ValueError(
            "fold_into was already called for this optimizer. Assign max_norm of the Folded it returned, or call its "
            "remove() first."
        )
    return Folded(optimizer, max_norm, Order.parse(ord), policy, (process_group, mesh))


def _left(backend: Backend, value: Any, gradients: Gradients, dtype: str = "float32") -> torch.Tensor:
    return tensor_of(backend.leave_scalar(value, dtype, gradients.grads))


def _skipping(found_inf: torch.Tensor | None, flags: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor that skips the step, at most 1.0: GradScaler adds up devices, the kernels test for 1.0."""
    skipping = None if found_inf is None else found_inf.clamp(max=1.0)
    for flag in flags:
        skipping = flag if skipping is None else torch.maximum(skipping, flag.to(skipping.device))
    return skipping
