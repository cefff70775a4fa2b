"""What a fused optimizer needs to clip within its step: the norm, the divisor, and whether to skip the step.

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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from gradclip._src.backends.torch.tensors import tensor_of
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.decision import Clipping
from gradclip._src.core.each_norm import EachNorm
from gradclip._src.core.nonfinite import PROPAGATE, Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.core.pipeline import decide, seen
from gradclip._src.core.protocols import Backend
from gradclip._src.core.rules import CLIP, Coefficient, Seen
from gradclip._src.core.values import Array
from gradclip._src.distributed.processes import ONE_PROCESS, Processes, processes_of, telling
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.inplace.gradients import Gradients, entered
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.passed.groups import have_thresholds
from gradclip._src.passed.parameters import ParameterList
from gradclip._src.step.optimizers import check_fused, check_listed_once
from gradclip._src.thresholds.holder import AdaptiveNorm
from gradclip.typing import Meshes, ProcessGroups, Scalar, Threshold

SMALLEST, LARGEST = 2.0**-50, 2.0**100
"""The proof holds for thresholds in this range, and for 0 and inf."""

_RAISED = 1.0 + 2.0**-23 + 2.0**-48


@dataclass(frozen=True)
class MeasuredStep:
    """The data for one step: norm before clipping, threshold, divisor, and a tensor that is 1.0 to skip the step.

    A divisor of None is known to be 1: given a divisor, the kernels would write every gradient. `shown` is what an
    `AdaptiveNorm` observes with the norm, `each` has the norms of the unscaled gradients one by one. Under a
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

    @property
    def alone(self) -> bool:
        """Whether no other processes are named."""
        return self.process_group is None and self.mesh is None

    def ask(
        self, processes: Processes, max_norm: float | AdaptiveNorm, scale: torch.Tensor | None = None
    ) -> tuple[Scalar, float]:
        """Record the arguments of a step for all processes. Return its threshold, and from which multiple it skips."""
        threshold: Scalar = max_norm
        skip_above = math.inf
        if isinstance(max_norm, AdaptiveNorm):
            threshold, skip_above = max_norm.for_order(self.order), max_norm.skip_above
        processes.ask(self.order, self.nonfinite, threshold, skip_above=skip_above, scale=scale)
        return threshold, skip_above

    @with_subnormals
    def measured(
        self,
        optimizer: Optimizer,
        max_norm: float | AdaptiveNorm,
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
            if isinstance(max_norm, AdaptiveNorm):
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
            if isinstance(max_norm, AdaptiveNorm):
                shown = max_norm.shown(norm, limit, seen(backend, made.norm, asked.max_norm, skip_above))
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
        self, optimizer: Optimizer, max_norm: float | AdaptiveNorm, grad_scale: torch.Tensor | None
    ) -> tuple[Processes, tuple[Scalar, float], tuple[Gradients, Backend, Arrays]]:
        """Return the processes, what `ask` returns, and the gradients, their backend and its arrays."""
        with telling(optimizer.param_groups, self.process_group, self.mesh):
            _check_one_threshold(optimizer)
            params = ParameterList.of(optimizer.param_groups)
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
            "a parameter group has got 'max_norm', a threshold of its own, after clip_at_step or fold_into was called. "
            "This fused step divides all gradients by one number. Call remove() of what that call returned, then "
            "clip_at_step again."
        )


def _measure_each(
    each: EachNorm, backend: Backend, arrays: Arrays, order: Order, gradients: Gradients, given: Array
) -> None:
    """Take the norms of the gradients one by one, as they will be when divided by `given`."""
    each.measure(backend, arrays, order, gradients.names_of_layers)
    if each.norms is not None:
        each.norms = each.norms / given


def checked(max_norm: Threshold | AdaptiveNorm) -> float | AdaptiveNorm:
    """Return a threshold as a number, or unchanged if it follows. Raises ValueError if the proof does not cover it."""
    if isinstance(max_norm, AdaptiveNorm):
        return max_norm
    number = float(check_threshold(max_norm))
    if number in (0.0, math.inf) or SMALLEST <= number <= LARGEST:
        return number
    raise ValueError(
        f"max_norm must be 0, inf, or between 2**-50 and 2**100 to fold into a step, got {number!r}: the optimizer "
        "divides in float32. Call gradclip.clip_grad_norm_ before the step instead."
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
