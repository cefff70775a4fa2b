"""Opacus' optimizers with gradclip's sums, float64 from the gradients of the examples to the last rounding.

The standard deviation of the noise is noise_multiplier times the sensitivity that `gradclip.clipped_sum_sensitivity`
proves, rounding included. It exceeds max_grad_norm by less than one part in a million if batches of up to 10,000
examples are expected.

How many examples that is for must not depend on the batch, which is private. It is for n = 4 * m + 1024, where m is
the expected size of a batch, or of all batches that are accumulated. Under Poisson sampling the mean is at most m + 1,
and Chernoff's bound, (e * (m + 1) / n)**n, says that a batch is larger than n with a probability below 1e-170. If a
batch is larger for another reason, n is the next power of two.

With noise, the last rounding is to nearest: what is done to a sum after the noise costs no privacy. Without noise it is
toward zero. So with `loss_reduction="sum"` the gradient that the wrapped optimizer gets is no longer than the sum in
float64, and that of one example at most max_grad_norm.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from gradclip._src.backends.imported import needed_for
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.private.sums.clip import per_example_clip
from gradclip._src.private.sums.layout import SumLayout
from gradclip._src.private.sums.sensitivity import Sensitivity, clipped_sum_sensitivity
from gradclip._src.private.sums.settings import as_number
from gradclip._src.public import public_in
from gradclip._src.thresholds.history import check_between
from gradclip._src.thresholds.private import PrivateQuantile
from gradclip._src.words import listed, typed

with needed_for("opacus", "torch"):
    from opacus.optimizers.utils import params


def check_settings(settings: Mapping[str, Any], optimizer: object, *, each_alone: bool) -> None:
    """Raise a TypeError or ValueError for a setting that is no number, or is out of range.

    `each_alone`: `max_grad_norm` holds a threshold for each parameter of `optimizer`.
    """
    noise = as_number("noise_multiplier", settings.get("noise_multiplier", 0.0))
    for name, value in settings.items():
        if name == "max_grad_norm":
            for threshold in _listed(value, len(params(optimizer))) if each_alone else [value]:
                if math.isinf(check_threshold(threshold, name)) and noise:
                    raise ValueError("max_grad_norm must be finite, or no noise can hide one example, got inf.")
        elif name == "unclipped_num_std":
            check_between(name, value, 0.0, 2.0**100, above_low=True)


def _listed(max_grad_norm: Any, count: int) -> list[object]:
    what = f"max_grad_norm must be a list with one threshold for each of the {count} parameters that are trained"
    if isinstance(max_grad_norm, str) or not hasattr(max_grad_norm, "__len__"):
        raise TypeError(f"{what}, which clipping='per_layer' clips one by one, got {typed(max_grad_norm)}.")
    if len(max_grad_norm) != count:
        raise ValueError(f"{what}, got {len(max_grad_norm)}. Those with requires_grad=False have none.")
    return list(max_grad_norm)


with needed_for("opacus", "torch"):
    import torch
    from opacus import optimizers
    from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed


@public_in("integrations.opacus")
class DPOptimizer(optimizers.DPOptimizer):
    """Opacus' optimizer with gradclip's sums: each example is clipped by its norm over all parameters.

    Arguments, methods and attributes are those of `opacus.optimizers.DPOptimizer`. `p.summed_grad` is float64.

    Attributes:
        names: the names of the parameters, for errors.
        num_nonfinite: how many examples with NaN or infinities there were so far. It is private, like the gradients.

    Raises:
        ValueError: a threshold that is negative or NaN; an infinite one with noise.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = DPOptimizer(
    ...     torch.optim.SGD([weight], lr=1.0),
    ...     noise_multiplier=0.0,
    ...     max_grad_norm=1.0,
    ...     expected_batch_size=None,
    ...     loss_reduction="sum",
    ... )
    >>> weight.grad_sample = torch.tensor([[3.0, 4.0], [0.25, 0.5]])
    >>> optimizer.step()
    >>> print(weight.data)
    tensor([-0.8500, -1.3000])

    """

    _each_alone = False

    def __init__(self, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object) -> None:
        check_settings(kwargs, optimizer, each_alone=self._each_alone)
        super().__init__(optimizer, *args, **kwargs)
        self.num_nonfinite = 0
        self._examples = 0
        self._noised: Sequence[torch.Tensor] = ()
        self.names: Mapping[torch.Tensor, str] = {}
        self._std(expected=0)

    def clip_and_accumulate(self) -> None:
        """Clip each example in `p.grad_sample` and add it to `p.summed_grad`."""
        params, samples = self.params, self.grad_samples
        self._check_batches(samples)
        for p in params:
            _check_processed_flag(p.grad_sample)
        summed, info = per_example_clip(samples, self._max_norm, sum_dtype="float64", nonfinite="drop")
        for p, total in zip(params, summed, strict=True):
            p.summed_grad = total if p.summed_grad is None else p.summed_grad.add_(total)
            _mark_as_processed(p.grad_sample)
        self._examples += len(samples[0])
        self._observe(samples, info.norms if isinstance(info.norms, list) else [info.norms])

    def _check_batches(self, samples: Sequence[torch.Tensor]) -> None:
        """Raise a ValueError that names the parameters whose gradients are of fewer examples than those of others."""
        most = max(map(len, samples), default=0)
        fewer = {i: len(sample) for i, sample in enumerate(samples) if len(sample) < most}
        if fewer:
            names = [f"{self.names.get(self.params[i], f'parameter {i}')} for {count}" for i, count in fewer.items()]
            raise ValueError(
                f"a batch of {most} examples made gradients of fewer examples: {listed(names)}. The layer was called "
                "with a smaller batch, as for position ids of shape (1, length). Expand its input to the batch, as in "
                'ids.expand(len(x), -1), or pass grad_sample_mode="ghost" to make_private.'
            )

    def add_noise(self) -> None:
        """Add noise to `p.summed_grad`, in float64, and write the result to `p.grad`."""
        std = self._std(self._expected())
        self._noised = [p.summed_grad + self._noise(std, p.summed_grad) for p in self._unused_sums()]
        self._write_gradients()

    def scale_grad(self) -> None:
        """Divide `p.grad` by the expected number of examples if `loss_reduction` is "mean", before it is rounded."""
        if self.loss_reduction == "mean":
            count = self.expected_batch_size * self.accumulated_iterations
            self._noised = [total / count for total in self._noised]
            self._write_gradients()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear all gradients, but not the sums of a step that goes on in the next virtual batch."""
        if not self._is_last_step_skipped:
            self._examples, self._noised = 0, ()
        super().zero_grad(set_to_none)

    @property
    def _max_norm(self) -> float | list[float]:
        return float(self.max_grad_norm)

    @property
    def _multiplier(self) -> float:
        return float(self.noise_multiplier)

    def _expected(self) -> int:
        """Return how many examples the public settings lead to expect in a sum."""
        return math.ceil((self.expected_batch_size or 0) * self.accumulated_iterations)

    def _std(self, expected: int) -> float:
        """Return the standard deviation of the noise on a sum of about so many examples."""
        if not self._multiplier:
            return 0.0
        most = 4 * expected + 1024
        most = most if self._examples <= most else 1 << (self._examples - 1).bit_length()
        elements = sum(p.numel() * (1 + p.is_complex()) for p in self.params)
        return self._promised(most, max(elements, 1)).noise_std(self._multiplier)

    def _promised(self, most: int, elements: int) -> Sensitivity:
        return _sensitivity(_as_tuple(self._max_norm), most, elements)

    def _noise(self, std: float, like: torch.Tensor) -> torch.Tensor:
        """Draw noise in float64, in secure mode from four draws, as Opacus does in float32."""
        if not std:
            return torch.zeros_like(like)
        if like.is_complex():
            return torch.view_as_complex(self._noise(std, torch.view_as_real(like)))

        def draw(size: Sequence[int]) -> torch.Tensor:
            return torch.normal(0.0, std, size, generator=self.generator, dtype=torch.float64, device=like.device)

        if not self.secure_mode:
            return draw(like.shape)
        draw((1, 1))  # the first draw shows more of the generator's state than others
        return (draw(like.shape) + draw(like.shape) + draw(like.shape) + draw(like.shape)) / 2

    def _unused_sums(self) -> list[Any]:
        """Return the parameters, and mark their sums as used. Raise ValueError if they have been."""
        for p in self.params:
            _check_processed_flag(p.summed_grad)
        for p in self.params:
            _mark_as_processed(p.summed_grad)
        return self.params

    def _write_gradients(self) -> None:
        for p, total in zip(self.params, self._noised, strict=True):
            p.grad = _rounded(total, p.dtype, toward_zero=not self._multiplier).view_as(p)

    def _observe(self, samples: Sequence[torch.Tensor], norms: Sequence[torch.Tensor]) -> int:
        """Return how many examples are not finite, and warn of them. A finite one may have a norm beyond float32."""
        strange = ~torch.stack([torch.isfinite(norm) for norm in norms]).all(0)
        if not strange.any():
            return 0
        rows = [torch.isfinite(sample[strange]).reshape(int(strange.sum()), -1).all(1) for sample in samples]
        count = int((~torch.stack(rows).all(0)).sum())
        self._warn_of(count, len(strange))
        return count

    def _warn_of(self, count: int, examples: int) -> None:
        self.num_nonfinite += count
        if count:
            warnings.warn(
                f"{count} of {examples} examples have gradients with NaN or infinities. They add nothing to the "
                "private sum. Look for what makes their loss overflow, or for a log or a division at 0.",
                stacklevel=5,
            )


@public_in("integrations.opacus")
class DPPerLayerOptimizer(DPOptimizer, optimizers.DPPerLayerOptimizer):
    """As `DPOptimizer`, but each example's gradient of each parameter is clipped alone, to one of `max_grad_norms`.

    The noise is for the root of the sum of their squares. Schedulers of `max_grad_norm` change neither.
    """

    _each_alone = True

    @property
    def _max_norm(self) -> float | list[float]:
        return [float(threshold) for threshold in self.max_grad_norms]


@public_in("integrations.opacus")
class AdaClipDPOptimizer(DPOptimizer, optimizers.AdaClipDPOptimizer):
    """As `DPOptimizer`, with a threshold C that follows a quantile of the norms: C <- C * exp(-rate * (b - target)).

    b is the noised share of examples with a norm of at most C: 1/2 + (unclipped - m / 2 + noise) / n, for m examples in
    the batch and n expected. In this form one example changes the count by 1/2, for which the noise is computed. Opacus
    divides the noised count by m, which is private, and loses the counts of all virtual batches but the last.

    The method is from Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping".
    """

    max_grad_norm: float
    sample_size: int
    unclipped_num: float

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear all gradients and counts, but not those of a step that goes on in the next virtual batch."""
        counts = (self.sample_size, self.unclipped_num) if self._is_last_step_skipped else (0, 0)
        super().zero_grad(set_to_none)
        self.sample_size, self.unclipped_num = counts

    def add_noise(self) -> None:
        """Add noise to the sums, and to the number of examples that were not clipped."""
        super().add_noise()
        self.unclipped_num += float(self._noise(float(self.unclipped_num_std), self._noised[0].new_zeros(())))

    def update_max_grad_norm(self) -> None:
        """Move the threshold toward the quantile."""
        expected = self._expected() or self.sample_size
        if expected:
            share = 0.5 + (self.unclipped_num - self.sample_size / 2) / expected
            step = -self.clipbound_learning_rate * (share - self.target_unclipped_quantile)
            moved = float(self.max_grad_norm) * math.exp(min(max(step, -700.0), 700.0))
            self.max_grad_norm = min(max(moved, self.min_clipbound), self.max_clipbound)

    @property
    def _multiplier(self) -> float:
        own = float(self.noise_multiplier)
        return PrivateQuantile.gradient_noise(own, float(self.unclipped_num_std)) if own else 0.0

    def _observe(self, samples: Sequence[torch.Tensor], norms: Sequence[torch.Tensor]) -> int:
        refused = super()._observe(samples, norms)
        self.sample_size += len(samples[0]) - refused
        self.unclipped_num += int((norms[0] <= self.max_grad_norm).sum())
        return refused


@public_in("integrations.opacus")
class DistributedDPOptimizer(DPOptimizer, optimizers.DistributedDPOptimizer):
    """As `DPOptimizer`, for `opacus.distributed.DifferentiallyPrivateDistributedDataParallel`.

    The first process adds the noise, and the processes add up their sums in float64.
    """

    def reduce_gradients(self) -> None:
        """Add up the gradients of all processes."""
        for total in self._noised:
            torch.distributed.all_reduce(total)
        if self.loss_reduction == "mean":
            self._noised = [total / self.world_size for total in self._noised]
        self._write_gradients()

    def _expected(self) -> int:
        return super()._expected() * self.world_size

    def _noise(self, std: float, like: torch.Tensor) -> torch.Tensor:
        return super()._noise(std if self.rank == 0 else 0.0, like)


@public_in("integrations.opacus")
class SimpleDistributedPerLayerOptimizer(
    DistributedDPOptimizer, DPPerLayerOptimizer, optimizers.SimpleDistributedPerLayerOptimizer
):
    """`DPPerLayerOptimizer` over several processes."""


@lru_cache(maxsize=64)
def _sensitivity(thresholds: tuple[float, ...], most: int, elements: int) -> Sensitivity:
    """Return the sensitivity of a float64 sum of up to `most` examples, added up in up to as many parts."""
    return clipped_sum_sensitivity(
        list(thresholds),
        batch_size=most,
        layout=SumLayout(partial_sums=most, elements=elements),
        sum_dtype="float64",
    )


def _as_tuple(max_norm: float | list[float]) -> tuple[float, ...]:
    return tuple(max_norm) if isinstance(max_norm, list) else (max_norm,)


def _rounded(total: torch.Tensor, dtype: torch.dtype, *, toward_zero: bool) -> torch.Tensor:
    """Convert float64 numbers, rounded to nearest or toward zero."""
    nearest = total.to(dtype)
    if not toward_zero:
        return nearest
    if total.is_complex():
        parts = torch.view_as_real(total), torch.view_as_real(nearest).dtype
        return torch.view_as_complex(_rounded(*parts, toward_zero=True))
    above = nearest.double().abs() > total.abs()
    return torch.where(above, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)
