"""What a fused optimizer needs to clip within its step: the norm, the divisor, and whether to skip the step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from gradclip.adaptive.holder import AdaptiveNorm
from gradclip.arguments import check_threshold
from gradclip.arithmetic import ordinary_arithmetic
from gradclip.backends.torch.tensors import tensor_of
from gradclip.core.arrays import Arrays
from gradclip.core.decision import Clipping
from gradclip.core.nonfinite import PROPAGATE, Nonfinite
from gradclip.core.norms import Order
from gradclip.core.pipeline import Seen, decide, seen
from gradclip.core.protocols import Backend
from gradclip.core.rules import CLIP
from gradclip.distributed.processes import Processes, processes_of, telling
from gradclip.fused.divisor import check_foldable, divisor, threshold_of_scaled, within_range
from gradclip.fused.optimizers import check_fused
from gradclip.gradients import Gradients, entered
from gradclip.parameters import ParameterList
from gradclip.typing import Meshes, ProcessGroups, Scalar, Threshold


@dataclass(frozen=True)
class Measured:
    """The data for one step: norm before clipping, threshold, divisor, and a tensor that is 1.0 to skip the step.

    A divisor of None is known to be 1: given a divisor, the kernels would write every gradient. `shown` is what an
    `AdaptiveNorm` observes with the norm.
    """

    norm: torch.Tensor
    max_norm: Scalar
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None
    shown: Seen | None


@dataclass(frozen=True)
class Request:
    """What all steps have in common: the order, the policy, and the processes that step together."""

    order: Order
    nonfinite: Nonfinite
    process_group: ProcessGroups
    mesh: Meshes

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

    @ordinary_arithmetic
    def measured(
        self,
        optimizer: Optimizer,
        max_norm: float | AdaptiveNorm,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> Measured:
        """Measure before a step. `grad_scale` and `found_inf` are what GradScaler gives the optimizer."""
        processes, (limit, skip_above), (gradients, backend, arrays) = self._entered(optimizer, max_norm, grad_scale)
        holders = processes.holders(backend)
        with backend.precision():
            given = backend.scalar(1.0 if grad_scale is None else grad_scale, arrays)
            if isinstance(max_norm, AdaptiveNorm):
                limit = within_range(backend, backend.scalar(limit, arrays))
            # With GradScaler, a step for which its scale was too large is skipped. It is no error.
            policy = self.nonfinite if self.nonfinite.raises and found_inf is None else PROPAGATE
            asked = Clipping(threshold_of_scaled(backend, limit, given), self.order, policy, CLIP)
            made = decide(backend, arrays, asked, gradients.names, holders=holders, at_once=False)
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
            return Measured(
                norm,
                limit,
                None if as_it_is else _left(backend, by, gradients),
                _skipping(found_inf, [_left(backend, flag, gradients) for flag in flags]),
                shown,
            )

    def _entered(
        self, optimizer: Optimizer, max_norm: float | AdaptiveNorm, grad_scale: torch.Tensor | None
    ) -> tuple[Processes, tuple[Scalar, float], tuple[Gradients, Backend, Arrays]]:
        """Return the processes, what `ask` returns, and the gradients, their backend and its arrays."""
        with telling(optimizer.param_groups, self.process_group, self.mesh):
            params = ParameterList.of(optimizer.param_groups)
        processes = processes_of(params, self.process_group, self.mesh)
        with processes.preparing():
            check_fused(optimizer)
            asked = self.ask(processes, max_norm, grad_scale)
            scalars = () if grad_scale is None else (grad_scale,)
            # The optimizer divides each gradient where it lies, so memory that two share would be divided twice.
            kept = {"to_write": True, "apart": True, "may_lack": True}
            return processes, asked, entered(params, processes, *scalars, **kept)


def checked(max_norm: Threshold | AdaptiveNorm) -> float | AdaptiveNorm:
    """Return a threshold as a number, or unchanged if it follows. Raises ValueError if no step can divide by it."""
    if isinstance(max_norm, AdaptiveNorm):
        return max_norm
    number = check_threshold(max_norm)
    return check_foldable(number if isinstance(number, float) else float(number))


def _left(backend: Backend, value: Any, gradients: Gradients, dtype: str = "float32") -> torch.Tensor:
    return tensor_of(backend.leave_scalar(value, dtype, gradients.grads))


def _skipping(found_inf: torch.Tensor | None, flags: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor that skips the step, at most 1.0: GradScaler adds up devices, the kernels test for 1.0."""
    skipping = None if found_inf is None else found_inf.clamp(max=1.0)
    for flag in flags:
        skipping = flag if skipping is None else torch.maximum(skipping, flag.to(skipping.device))
    return skipping
