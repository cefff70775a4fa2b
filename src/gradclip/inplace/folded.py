"""Clipping within the step of a fused optimizer of PyTorch, which divides gradients as it reads them.

A hook before the step measures the norm and sets `optimizer.grad_scale`, by which the fused kernels divide, and
`optimizer.found_inf`, with which they skip the step. A hook after it puts both back.
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
    """What a step needs: the norm before clipping, the divisor, and what skips the step, a tensor of 0.0 or 1.0.

    None stands for a divisor that is known to be 1: with one the kernels write every gradient.
    """

    norm: torch.Tensor
    max_norm: Scalar
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None


class Folded:
    """Clipping within the steps of one optimizer, until `remove()`.

    Attributes:
        norm: the norm before clipping at the last step, of unscaled gradients; None before the first.
        max_norm: the threshold, or the `AdaptiveNorm` that it follows from; another one holds from the next step on.

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
        """The threshold, or what it follows from."""
        return self._max_norm

    @max_norm.setter
    def max_norm(self, value: Threshold | AdaptiveNorm) -> None:
        if isinstance(value, AdaptiveNorm):
            self._max_norm: float | AdaptiveNorm = value
            return
        number = check_threshold(value)
        self._max_norm = check_foldable(number if isinstance(number, float) else float(number))

    def remove(self) -> None:
        """End it: from the next step on the optimizer gets gradients as they are."""
        for hook in self._hooks:
            hook.remove()
        self._restore(self._optimizer)
        self._guard.remove(self._optimizer)
        _FOLDED.discard(self._optimizer)

    # The step

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure before the step; where a closure makes the gradients, after that."""
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
        # A step that GradScaler skips is no error: its scale was too large.
        skips = self._nonfinite.raises and found_inf is not None and bool(found_inf.item())
        policy = PROPAGATE if skips else self._nonfinite
        with processes.preparing():
            processes.ask(self._order, self._nonfinite, max_norm)
            gradients, backend, arrays = entered(params, processes, *(() if scale is None else (scale,)))
            _check_apart(gradients, params)
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
            return Measured(norm, max_norm, grad_scale, _skipping(found_inf, flags))

    def _end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._without_momentum:
            clear_momentum(optimizer, self._without_momentum, vars(optimizer)["found_inf"] == 1.0)
        last = self._measured_last
        self._restore(optimizer)
        if last is not None and isinstance(self._max_norm, AdaptiveNorm):
            self._max_norm.observe(last.norm, last.max_norm, self._order, self._nonfinite)

    def _restore(self, optimizer: Optimizer) -> None:
        """Put the attributes back: GradScaler deletes what it has set, and others raise where they find them."""
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
    """Make each `optimizer.step()` clip the gradients of all its parameters together, without a pass of its own.

    The step measures the norm N and divides every gradient by max(1, N / max_norm) as the optimizer reads it.

    Args:
        optimizer: Adam, AdamW, SGD or Adagrad of PyTorch, made with `fused=True`. Two optimizers clip apart: those with
            the thresholds C1 and C2 together have a norm of at most sqrt(C1**2 + C2**2).
        max_norm: the threshold, 0, inf or from 2**-50 to 2**100, in the units of unscaled gradients. Or a
            `gradclip.AdaptiveNorm`, whose thresholds are kept within that range. The steps that its `skip_above` skips
            leave parameters and state as they are.
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: what happens where a gradient holds NaN or infinities. "propagate": all become NaN. "raise": an
            error before the step, for which each step waits. "skip": the step leaves parameters and state as they are.
            GradScaler skips such steps whatever is said here.
        process_group: as in `gradclip.clip_grad_norm_`, for parameters of which each process holds other ones.
        mesh: the same as a mesh.

    Returns:
        A `Folded`: `.norm` is the norm before clipping at the last step, `.max_norm` may be set, `.remove()` ends it.

    Raises:
        TypeError: another optimizer. ValueError: one without `fused=True`, or folded already, a threshold out of range,
        `nonfinite="zero"`, which takes a pass over the gradients. At a step, and then the parameters are as they were:
        ValueError for two parameters whose gradients share memory, FloatingPointError under "raise", and the errors of
        `gradclip.clip_grad_norm_`.

    The norm of what the update uses is at most `max_norm`, in exact arithmetic, for float32 and float64 parameters. The
    optimizer puts these gradients in `.grad`, too. For half types it uses float32 quotients, for which the
    bound holds, and rounds to nearest what it puts in `.grad`. `gradclip.core.divisor` has the argument.

    Under GradScaler call `scaler.step(optimizer)`, with `scaler.unscale_(optimizer)` before it or without. `state_dict`
    does not know of the clipping: for a new optimizer that loads a checkpoint call this again.

    The attributes `grad_scale` and `found_inf` of fused optimizers, which do this, are those that
    `torch.amp.GradScaler` sets in PyTorch 2.13.

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
            "nonfinite='zero' has to write the gradients before the step, which folding into it is there to save. Call "
            "gradclip.clip_grad_norm_(..., nonfinite='zero') before optimizer.step(), or pass nonfinite='skip'."
        )
    check_fused(optimizer)
    if optimizer in _FOLDED:
        raise ValueError(
            "this optimizer clips already, by an earlier fold_into. Set max_norm of what that returned, or call its "
            "remove() first."
        )
    return Folded(optimizer, max_norm, Order.parse(ord), policy, (process_group, mesh))


def _check_apart(gradients: Gradients, params: ParameterList) -> None:
    """Raise a ValueError where parameters share a gradient: the optimizer would divide it once for each."""
    if len(gradients.grads) < sum(grad is not None for grad in params.gradients):
        raise ValueError(
            "some of the parameters share the memory of their gradients, which the optimizer would divide once for "
            "each of them. Call gradclip.clip_grad_norm_, which scales it once, before the step, and remove() this."
        )


def _left(backend: Backend, value: Any, gradients: Gradients, dtype: str = "float32") -> torch.Tensor:
    return tensor_of(backend.leave_scalar(value, dtype, gradients.grads))


def _skipping(found_inf: torch.Tensor | None, flags: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return what skips the step. It is at most 1.0: GradScaler adds up devices, and the kernels know only 1.0."""
    skipping = None if found_inf is None else found_inf.clamp(max=1.0)
    for flag in flags:
        skipping = flag if skipping is None else torch.maximum(skipping, flag.to(skipping.device))
    return skipping
