"""PyTorch's fused optimizers, which divide gradients as they read them, and what each needs to clip within its step.

Gradients divided by the divisor never exceed the threshold, even by rounding.

Fused optimizers of PyTorch divide each element by one float32 number S as they read it. Let x be the gradients in
memory, S0 the divisor they already need (that of scaled losses, else 1), C the threshold, and y the quotients. The
result satisfies ||y|| <= C in exact arithmetic. The proof, with v = 2**-24:

1. The threshold of x is T <= C * S0. It is exact if S0 is a power of two, else lowered by 4v.
2. If N, the exact norm of x, is at most T, then S = S0. Division by a power of two is exact in the normal range. Any
   other division adds at most v, relatively, which lowering T has covered.
3. Otherwise `coefficient` proves c <= T / N. Then S = S0 / c * (1 + 2v + 2**-48) is computed in float64, which loses
   less than 2**-49, and rounded to float32: S >= S0 / c * (1 + 2v + 2**-49) / (1 + v).
4. Rounding to nearest increases a quotient by a factor of at most (1 + 2v) / (1 + v), even if it is formed in float64
   first. So |y_i| <= (c / S0) * (1 - 2**-50) * |x_i|, or larger by 2**-150 below float32's normal range.
5. Fewer than 2**50 such elements add less than 2**-100 to a norm. With C >= 2**-50 that is at most C * 2**-50, which
   the factor (1 - 2**-50) covers.

If step 2 keeps an S0 other than 1, quotients below the normal range may be larger by 2**-150 each. If S would leave
float32's range, it is infinite, and finite gradients become zeros. The division is assumed to be that of IEEE 754, as
on CPUs and in CUDA without fast math.
"""

import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from gradclip._src.annotations import (
    Integers,
    Meshes,
    NamedThresholds,
    ProcessGroups,
    Scalar,
    Threshold,
    UnitAxis,
    Where,
)
from gradclip._src.backends import any_distributed, shards_of
from gradclip._src.backends.torch.tensors import tensor_of
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.decision import Clipping
from gradclip._src.core.nonfinite import PROPAGATE, Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.core.pipeline import EachNorm, decide, seen
from gradclip._src.core.protocols import Backend
from gradclip._src.core.rules import CLIP, Coefficient, Seen
from gradclip._src.core.values import Array
from gradclip._src.distributed.processes import ONE_PROCESS, Processes, processes_of, telling
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.inplace.gradients import Gradients, entered
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.passed.leaves import Choice, choice_of
from gradclip._src.passed.parameters import ParameterList, have_thresholds
from gradclip._src.step.asked import Scope
from gradclip._src.step.wrapped import groups_of
from gradclip._src.thresholds.holder import AdaptiveThreshold

_DEPTH = 16  # of frames from a hook to who calls the step
_DIVIDES = "_step_supports_amp_scaling"
INSTEAD = "To clip before the step, pass fused=False to clip_at_step"
OF_SCALER = ("grad_scale", "found_inf")
"""The attributes that a GradScaler gives an optimizer for one step."""


def check_fused(optimizer: object) -> None:
    """Raise if an optimizer cannot divide gradients as it reads them: TypeError for its class, else ValueError."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Adam | AdamW | SGD | Adagrad):
        raise TypeError(
            f"only steps of Adam, AdamW, SGD and Adagrad of torch.optim can clip as they read the gradients, got {kind}"
            f". {INSTEAD}."
        )
    if inspect.unwrap(type(optimizer).step) not in [inspect.unwrap(one.step) for one in (Adam, AdamW, SGD, Adagrad)]:
        raise TypeError(f"{kind} has its own step method, which may not divide gradients as PyTorch's does. {INSTEAD}.")
    if not all(group.get("fused") for group in optimizer.param_groups):
        raise ValueError(
            f"this {kind} was not created with fused=True for all of its parameter groups, so its step cannot clip. "
            f"Create it as {kind}(..., fused=True). {INSTEAD}."
        )


def check_listed_once(optimizer: Optimizer) -> None:
    """Raise a ValueError if a parameter is listed twice: fused kernels would divide its gradient twice."""
    for number, group in enumerate(optimizer.param_groups):
        if len(set(map(id, group["params"]))) < len(group["params"]):
            raise ValueError(
                f"parameter group {number} lists a parameter twice, and a fused {type(optimizer).__name__} divides "
                f"its gradient twice. List each parameter once. {INSTEAD}."
            )


def forget_scaler(optimizer: Optimizer) -> None:
    """Remove what a GradScaler has set, after an error.

    It does not, and its next step would multiply its scale by what it finds.
    """
    if "found_inf" in vars(optimizer):
        for name in OF_SCALER:
            vars(optimizer).pop(name, None)


def makes_state(optimizer: Optimizer) -> bool:
    """Say whether `torch.distributed.checkpoint` steps the optimizer with gradients of zero, to make its state."""
    if optimizer.state:
        return False
    frame, deep = sys._getframe(1), 0
    while frame.f_back is not None and deep < _DEPTH:
        if frame.f_code.co_name == "_init_optim_state":
            return True
        frame, deep = frame.f_back, deep + 1
    return False


def lay_out_gradients(optimizer: Optimizer) -> None:
    """Replace gradients that do not lie in memory as their parameters do, such as expanded ones.

    Fused kernels go through the memory of a parameter and of its gradient side by side.
    """
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        grad = parameter.grad
        if grad is None or grad.layout is not torch.strided:
            continue
        if type(grad) is torch.Tensor:
            laid_out = _laid_out_like(parameter, grad)
            if laid_out is not grad:
                parameter.grad = laid_out
        elif any_distributed([grad]) and grad.placements == getattr(parameter, "placements", None):
            _lay_out_shard(parameter, grad)  # PyTorch makes new memory for other placements


def _lay_out_shard(parameter: Any, grad: Any) -> None:
    around, (shard,) = shards_of([parameter], [parameter]), shards_of([grad], [parameter]).locals
    laid_out = _laid_out_like(around.locals[0], shard)
    if laid_out is not shard:
        (parameter.grad,) = around.whole([laid_out])


def _laid_out_like(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if (grad.is_contiguous() and parameter.is_contiguous()) or grad.stride() == parameter.stride():
        return grad
    return torch.empty_like(parameter, dtype=grad.dtype, requires_grad=False).copy_(grad)


def without_momentum(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters whose momentum the next step will create."""
    if not isinstance(optimizer, SGD):
        return []
    each = (p for group in optimizer.param_groups if group["momentum"] for p in group["params"])
    return [p for p in each if p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None]


def clear_momentum(optimizer: Optimizer, parameters: Sequence[torch.Tensor], skipped: torch.Tensor) -> None:
    """Zero the momentum created by a first step that was skipped: its memory is uninitialized.

    For PyTorch the next step is not a first one, so dampening (if any) applies to it.
    """
    for parameter in parameters:
        momentum = optimizer.state[parameter]["momentum_buffer"]
        momentum.masked_fill_(skipped.to(momentum.device), 0.0)


def with_memory_of_its_own(parameter: torch.Tensor) -> None:
    """Copy a gradient if the backward pass may still read its memory, or another gradient shares it.

    PyTorch does not copy gradients that it can keep. Such a gradient may be a view of what other parameters also
    received.
    """
    grad = parameter.grad
    if grad is not None and not _owns_its_memory(grad):
        parameter.grad = grad.clone()


def _owns_its_memory(grad: torch.Tensor) -> bool:
    """Say whether nothing else can read the memory of a gradient."""
    # Sparse, distributed and other tensors hold tensors, which others may hold too. Nothing counts those holders.
    if grad.layout is not torch.strided or type(grad) is not torch.Tensor:
        return False
    # One use is the gradient itself, the other is the storage object asked here.
    return torch._C._storage_Use_Count(grad.untyped_storage()._cdata) <= 2


class Guard:
    """Wraps a step so that the optimizer's attributes are restored if it fails. Post-step hooks run only on success.

    It also marks the optimizer for GradScaler as one whose step divides gradients. PyTorch marks it when it is created,
    but not a copy.
    """

    def __init__(self, optimizer: Optimizer, restore: Callable[[Optimizer], None]) -> None:
        self._before = vars(optimizer).get("step")
        self._unmarked = not getattr(optimizer, _DIVIDES, False)
        setattr(optimizer, _DIVIDES, True)

        # Compiled code would treat the divisor as a constant.
        @torch.compiler.disable
        @functools.wraps(optimizer.step)
        def step(optimizer: Optimizer, *args: object, **kwargs: object) -> Any:
            try:
                if self._before is not None:
                    return self._before(*args, **kwargs)
                return type(optimizer).step(optimizer, *args, **kwargs)
            except BaseException:
                restore(optimizer)
                raise

        # A method, like the original: learning-rate schedulers access its `__func__`.
        self._step = types.MethodType(step, optimizer)
        optimizer.step = self._step

    def remove(self, optimizer: Optimizer) -> None:
        """Restore the original step. If a scheduler has wrapped this one since, it stays inside and does nothing."""
        if self._unmarked:
            vars(optimizer).pop(_DIVIDES, None)
        if vars(optimizer).get("step") is not self._step:
            return
        del optimizer.step
        if self._before is not None:
            optimizer.step = self._before


SMALLEST, LARGEST = 2.0**-50, 2.0**100
"""The proof holds for thresholds in this range, and for 0 and inf."""

_RAISED = 1.0 + 2.0**-23 + 2.0**-48


@dataclass(frozen=True)
class MeasuredStep:
    """The data for one step: norm before clipping, threshold, divisor, and a tensor that is 1.0 to skip the step.

    A divisor of None is known to be 1: given a divisor, the kernels would write every gradient. `shown` is what an
    `AdaptiveThreshold` observes with the norm, `each` has the norms of the unscaled gradients one by one. Under a
    GradScaler, `overflow` is 1.0 if gradients are not finite, on any process.
    """

    norm: torch.Tensor
    max_norm: Scalar
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None
    shown: Seen | None
    each: EachNorm | None = None
    overflow: torch.Tensor | None = None


@dataclass(frozen=True)
class Request:
    """What all steps have in common: the order, the policy, and the processes that step together."""

    order: Order
    nonfinite: Nonfinite
    process_group: ProcessGroups
    mesh: Meshes
    where: Where = None
    integers: Integers = "keep"
    scope: Scope = "global"
    eps: Threshold = 1e-3
    unit_axis: UnitAxis = None

    @property
    def choice(self) -> Choice:
        """Which gradients count."""
        return choice_of(self.where, self.integers)

    @property
    def arguments(self) -> dict[str, Any]:
        """What a call gets that clips or measures the gradients."""
        where, integers = self.where, self.integers
        return {"process_group": self.process_group, "mesh": self.mesh, "where": where, "integers": integers}

    @property
    def alone(self) -> bool:
        """Whether no other processes are named."""
        return self.process_group is None and self.mesh is None

    def ask(
        self, processes: Processes, max_norm: float | AdaptiveThreshold, scale: torch.Tensor | None = None
    ) -> tuple[Scalar, float]:
        """Record the arguments of a step for all processes. Return its threshold, and from which multiple it skips."""
        threshold: Scalar = max_norm
        skip_above = math.inf
        if isinstance(max_norm, AdaptiveThreshold):
            threshold, skip_above = max_norm._for_order(self.order), max_norm.skip_above
        processes.ask(self.order, self.nonfinite, threshold, skip_above=skip_above, scale=scale)
        return threshold, skip_above

    @with_subnormals
    def measured(
        self,
        optimizer: Optimizer,
        max_norm: float | AdaptiveThreshold,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        each: EachNorm | None = None,
    ) -> MeasuredStep:
        """Measure before a step. `grad_scale` and `found_inf` are what GradScaler gives the optimizer."""
        processes, (limit, skip_above), (gradients, backend, arrays) = self._entered(optimizer, max_norm, grad_scale)
        holders = processes.holders(backend)
        with backend.precision():
            given = backend.scalar(1.0 if grad_scale is None else grad_scale, arrays)
            if each is not None and processes is ONE_PROCESS:
                _measure_each(each, backend, arrays, self.order, gradients, given)
            if isinstance(max_norm, AdaptiveThreshold):
                limit = within_range(backend, backend.scalar(limit, arrays))
            # With GradScaler, a step for which its scale was too large is skipped. It is no error.
            policy = self.nonfinite if self.nonfinite.raises and found_inf is None else PROPAGATE
            asked = Clipping(threshold_of_scaled(backend, limit, given), self.order, policy, CLIP)
            made = decide(backend, arrays, asked, gradients.names, holders=holders, as_one=False)
            finite = backend.xp.isfinite(made.norm.value)
            if (
                found_inf is not None
                and self.nonfinite.raises
                and not finite
                and not processes.anywhere(bool(found_inf))
            ):
                holders.raise_nonfinite(backend, arrays, gradients.names())
            by = divisor(backend, made.coefficient, given)
            norm = _left(backend, made.norm.product() / given, gradients, holders.norm_dtype(arrays))
            flags = [finite == 0] if self.nonfinite.blanks or found_inf is not None else []
            shown = None
            if isinstance(max_norm, AdaptiveThreshold):
                shown = max_norm._shown(norm, limit, seen(backend, made.norm, asked.max_norm, skip_above))
                flags += [shown.spike] if skip_above < math.inf else []
            as_it_is = grad_scale is None and backend.concrete and by == 1.0
            gradients.separate(backend)
            return MeasuredStep(
                norm,
                limit,
                None if as_it_is else _left(backend, by, gradients),
                _skipping(found_inf, [_left(backend, flag, gradients) for flag in flags]),
                shown,
                each,
                None if found_inf is None else _left(backend, finite == 0, gradients),
            )

    def _entered(
        self, optimizer: Optimizer, max_norm: float | AdaptiveThreshold, grad_scale: torch.Tensor | None
    ) -> tuple[Processes, tuple[Scalar, float], tuple[Gradients, Backend, Arrays]]:
        """Return the processes, what `ask` returns, and the gradients, their backend and its arrays."""
        with telling(optimizer.param_groups, self.process_group, self.mesh):
            _check_one_threshold(optimizer)
            params = ParameterList.of(groups_of(optimizer))
        processes = processes_of(params, self.process_group, self.mesh)
        with processes.preparing():
            check_fused(optimizer)
            check_listed_once(optimizer)
            asked = self.ask(processes, max_norm, grad_scale)
            scalars = () if grad_scale is None else (grad_scale,)
            # The optimizer divides each gradient where it lies, so memory that two share would be divided twice.
            kept = {"to_write": True, "apart": True, "may_lack": True}
            return processes, asked, entered(params, processes, *scalars, **kept)


def _check_one_threshold(optimizer: Optimizer) -> None:
    if have_thresholds(optimizer.param_groups):
        raise ValueError(
            "a parameter group has got 'max_norm', a threshold of its own, after clip_at_step was called. This fused "
            "step divides all gradients by one number. Call remove() of what that call returned, then clip_at_step "
            "again."
        )


def _measure_each(
    each: EachNorm, backend: Backend, arrays: Arrays, order: Order, gradients: Gradients, given: Array
) -> None:
    """Take the norms of the gradients one by one, as they will be when divided by `given`."""
    each.measure(backend, arrays, order, gradients.names_of_layers)
    if each.norms is not None:
        each.norms = each.norms / given


def checked(max_norm: Threshold | AdaptiveThreshold | NamedThresholds) -> float | AdaptiveThreshold:
    """Return a threshold as a number, or unchanged if it follows. Raises ValueError if the proof does not cover it."""
    if isinstance(max_norm, AdaptiveThreshold):
        return max_norm
    if isinstance(max_norm, Mapping):
        raise ValueError(
            f"a fused step divides all gradients by one number, and max_norm has one for each pattern. {INSTEAD}."
        )
    number = float(check_threshold(max_norm))
    if number in (0.0, math.inf) or SMALLEST <= number <= LARGEST:
        return number
    raise ValueError(
        f"max_norm must be 0, inf, or between 2**-50 and 2**100 within a fused step, which divides in float32, got "
        f"{number!r}. {INSTEAD}."
    )


def within_range(backend: Backend, max_norm: Array) -> Array:
    """Return an adaptive threshold, moved to the nearest one that this module's proof covers."""
    xp = backend.xp
    nearest = xp.minimum(xp.maximum(max_norm, SMALLEST * xp.ones_like(max_norm)), LARGEST * xp.ones_like(max_norm))
    return xp.where((max_norm == 0) | xp.isinf(max_norm), max_norm, nearest)


def threshold_of_scaled(backend: Backend, max_norm: float | Array, given: Array) -> Array:
    """Return the threshold of gradients that will be divided by `given`: step 1 of this module's docstring."""
    exact = backend.xp.abs(backend.xp.frexp(given)[0]) == 0.5
    scaled = given * max_norm
    return backend.xp.where(exact, scaled, scaled * (1.0 - 2.0**-22))


def divisor(backend: Backend, coefficient: Coefficient, given: Array) -> Array:
    """Return the divisor from the coefficient of scaled gradients: steps 2 and 3; NaN if the coefficient is NaN."""
    xp, factors = backend.xp, coefficient.wide
    c = factors.first if factors.second is None else factors.first * factors.second
    beyond = c < given * 2.0**-126
    raised = given / xp.where(beyond, 1.0, c) * _RAISED
    return xp.where(coefficient.keep, given, xp.where(beyond, math.inf, raised))


def _left(backend: Backend, value: Any, gradients: Gradients, dtype: str = "float32") -> torch.Tensor:
    return tensor_of(backend.leave_scalar(value, dtype, gradients.grads))


def _skipping(found_inf: torch.Tensor | None, flags: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor that skips the step, at most 1.0: GradScaler adds up devices, the kernels test for 1.0."""
    skipping = None if found_inf is None else found_inf.clamp(max=1.0)
    for flag in flags:
        skipping = flag if skipping is None else torch.maximum(skipping, flag.to(skipping.device))
    return skipping
