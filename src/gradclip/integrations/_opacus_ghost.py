"""Opacus' `grad_sample_mode="ghost"` with gradclip's norms and sums: large gradients of examples are not made.

The model remembers its arguments, the criterion what it is called with, and `backward()` of the loss computes the
gradients that `gradclip.clipped_grad` clips, example by example, with a plan for each parameter. That takes one more
forward pass than Opacus, and no second backward pass.

Up to 256 examples are added up at a time. The noise also covers what sums of factors round
(`private/sums/rounding.py`): for n examples at most 6.1e-8 n max_grad_norm.
"""

import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from gradclip._src.backends.imported import needed_for
from gradclip._src.core.formats import FLOAT64
from gradclip._src.private.batching.verbs import named
from gradclip._src.private.functions.clipped import ClippedFunction
from gradclip._src.private.functions.transforms import clipped_grad
from gradclip._src.private.sums.layout import SumLayout
from gradclip._src.private.sums.rounding import FactoredGradients
from gradclip._src.private.sums.sensitivity import Sensitivity, sensitivity_of
from gradclip._src.private.sums.settings import PerExampleSettings
from gradclip._src.public import public_in
from gradclip._src.tree import flatten
from gradclip.integrations._opacus_optimizers import DPOptimizer

with needed_for("opacus", "torch"):
    import torch
    from opacus.grad_sample.gsm_no_op import GradSampleModuleNoOp
    from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed

_MOST = 256  # examples that are added up at a time
_TENSOR = "a tensor of the batch"


class _ForwardCall(NamedTuple):
    """A call of the model in training: its arguments and its result."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    output: Any


@public_in("integrations.opacus")
class GhostModule(GradSampleModuleNoOp):
    """The wrapper of a model. In training, calls build no graph: they are computed again, example by example."""

    last: _ForwardCall | None = None

    def builds_losses(self) -> bool:
        """Return whether losses of the model are to be differentiated now, as in training."""
        return self.training and torch.is_grad_enabled()

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Call the model."""
        if not self.builds_losses():
            return self._module(*args, **kwargs)
        with torch.no_grad():
            output = self._module(*args, **kwargs)
        self.last = _ForwardCall(args, kwargs, output)
        return output


@public_in("integrations.opacus")
class GhostDPOptimizer(DPOptimizer):
    """As `DPOptimizer`, for sums that the criterion's loss makes in `backward()`."""

    def take(self, sums: Sequence[torch.Tensor], norms: torch.Tensor) -> None:
        """Take the clipped sum of a batch for each of `params`, in float64, and the norms of the examples."""
        if any(p.grad_sample is not None and not hasattr(p.grad_sample, "_processed") for p in self.params):
            raise RuntimeError(
                "backward() was called twice before a step. Call optimizer.step() after each backward(), and for "
                "virtual batches use opacus.utils.batch_memory_manager.BatchMemoryManager."
            )
        for p, total in zip(self.params, sums, strict=True):
            p.grad_sample = total[None]
        self._examples += len(norms)
        self._warn_of(int((~torch.isfinite(norms)).sum()), len(norms))

    def clip_and_accumulate(self) -> None:
        """Add the sum of clipped examples to `p.summed_grad`."""
        for p in self.params:
            _check_processed_flag(p.grad_sample)
        for p in self.params:
            total = p.grad_sample[0]
            p.summed_grad = total if p.summed_grad is None else p.summed_grad.add_(total)
            _mark_as_processed(p.grad_sample)

    @property
    def _max_norm(self) -> float:
        return float(self.max_grad_norm)

    def _promised(self, most: int, elements: int) -> Sensitivity:
        return _sensitivity(self._max_norm, most, elements)


@public_in("integrations.opacus")
class GhostCriterion:
    """A criterion whose losses compute the clipped gradients of all examples in `backward()`.

    Call it as the criterion, with what the model returned in the last call first. All tensors in the arguments of both
    have the batch on axis 0. A criterion without an attribute `reduction` must return one number for a batch of one.
    In evaluation, after `model.eval()` or under `torch.no_grad()`, it is called as it is.

    Raises:
        ValueError: the criterion's `reduction` is not that of the engine.
        TypeError: when called: a first argument that is not what the model returned, such as a view of it.
    """

    def __init__(
        self, module: GhostModule, optimizer: GhostDPOptimizer, criterion: Callable[..., Any], loss_reduction: str
    ) -> None:
        own = getattr(criterion, "reduction", loss_reduction)
        if own != loss_reduction:
            raise ValueError(f"the criterion has reduction={own!r}, but loss_reduction is {loss_reduction!r}. Use one.")
        self.module, self.optimizer, self.criterion, self.loss_reduction = module, optimizer, criterion, loss_reduction
        self._made: tuple[object, ClippedFunction] | None = None

    def __call__(self, *args: object, **kwargs: object) -> "GhostLoss | torch.Tensor":
        if not self.module.builds_losses():
            return self.criterion(*args, **kwargs)
        call = self.module.last
        if call is None or not args or args[0] is not call.output:
            raise TypeError(
                "the criterion must get what the model returned in its last call in training, as it is: examples are "
                "computed again from it. Call criterion(model(x), y). Move what is between both, such as flatten, into "
                "the model or into a criterion of your own."
            )
        return GhostLoss(self, call, args[1:], kwargs, 1.0)

    def value(self, *args: object, **kwargs: object) -> torch.Tensor:
        """Return the criterion's value, reduced by `loss_reduction` over all numbers that it gives."""
        if not hasattr(self.criterion, "reduction"):
            return self.criterion(*args, **kwargs)
        self.criterion.reduction = "none"
        try:
            every = self.criterion(*args, **kwargs)
        finally:
            self.criterion.reduction = self.loss_reduction
        return every.mean() if self.loss_reduction == "mean" else every.sum()

    def clipped_sums(self, loss: "GhostLoss") -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the sum of the clipped gradients of a loss for each parameter, and the norms of the examples."""
        flat = flatten((tuple(loss.call.args), dict(loss.call.kwargs), tuple(loss.args), dict(loss.kwargs)))
        tensors = [x for x in flat.leaves if isinstance(x, torch.Tensor)]
        lengths = {len(x) if x.ndim else 0 for x in tensors}
        if len(lengths) != 1:
            raise ValueError(
                f"all tensors in the arguments of model and criterion must have the batch on axis 0, got the shapes "
                f"{[tuple(x.shape) for x in tensors]}. Keep other tensors in the model or in the criterion."
            )
        names = {id(p): name for name, p in self.module._module.named_parameters()}
        parameters = {names[id(p)]: p for p in self.optimizer.params}
        sums = {name: torch.zeros_like(p, dtype=_wide(p)) for name, p in parameters.items()}
        norms = [tensors[0].new_zeros(0, dtype=torch.float64)]
        clipped = self._clipped(flat, loss.scale)
        for start in range(0, lengths.pop(), _MOST):
            summed, outputs = clipped(parameters, [x[start : start + _MOST] for x in tensors])
            norms.append(outputs.norms.double())
            for name, total in summed.items():
                sums[name] += total
        return list(sums.values()), torch.cat(norms)

    def _clipped(self, flat: Any, scale: float) -> ClippedFunction:
        """Return the function that clips and adds up, the one of the last call if nothing but tensors changed."""
        threshold = self.optimizer._max_norm
        others = [_TENSOR if isinstance(x, torch.Tensor) else x for x in flat.leaves]
        kinds = tuple(map(named, others))
        key = None if None in kinds else (flat.structure, kinds, threshold, scale)
        if key is not None and self._made is not None and self._made[0] == key:
            return self._made[1]
        structure, model = flat.structure, self.module._module

        def loss_of(parameters: Mapping[str, torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            given = iter(tensors)
            args, kwargs, rest, more = structure.unflatten([next(given) if x is _TENSOR else x for x in others])
            output = torch.func.functional_call(model, dict(parameters), args, kwargs)
            return scale * self.value(output, *rest, **more)

        made = clipped_grad(loss_of, threshold, batch_argnums=1, sum_dtype="float64", return_norms=True)
        self._made = (key, made)
        return made


@public_in("integrations.opacus")
class GhostLoss:
    """The loss of a batch. It may be multiplied by a number. `backward()` gives the optimizer the clipped sums."""

    def __init__(
        self,
        criterion: GhostCriterion,
        call: _ForwardCall,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        scale: float,
    ) -> None:
        self.criterion, self.call, self.args, self.kwargs, self.scale = criterion, call, args, kwargs, scale

    def backward(self) -> None:
        """Clip the gradient of each example, and give the optimizer their sum."""
        self.criterion.optimizer.take(*self.criterion.clipped_sums(self))

    def detach(self) -> torch.Tensor:
        """Return the value."""
        with torch.no_grad():
            return self.scale * self.criterion.value(self.call.output, *self.args, **self.kwargs)

    def item(self) -> float:
        """Return the value as a number."""
        return float(self.detach())

    def __mul__(self, other: object) -> "GhostLoss":
        if not isinstance(other, numbers.Real):
            return NotImplemented
        return GhostLoss(self.criterion, self.call, self.args, self.kwargs, self.scale * float(other))

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> "GhostLoss":
        return self * (1.0 / float(other)) if isinstance(other, numbers.Real) else NotImplemented

    def __str__(self) -> str:
        return f"{self.item():.4f}"


def _wide(p: torch.Tensor) -> torch.dtype:
    return torch.complex128 if p.is_complex() else torch.float64


@lru_cache(maxsize=64)
def _sensitivity(threshold: float, most: int, elements: int) -> Sensitivity:
    """Return the sensitivity of a float64 sum of up to `most` examples, which may come in factors."""
    return sensitivity_of(
        PerExampleSettings(threshold, sum_dtype="float64"),
        batch_size=most,
        sum_format=FLOAT64,
        layout=SumLayout(partial_sums=most, elements=elements),
        factors=FactoredGradients(_MOST, cancel=True),
    )
