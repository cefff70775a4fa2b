"""A threshold for private training, that follows a quantile of the examples' norms by a noised count.

It is the method of Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping" (NeurIPS). A norm of a
private batch must not be looked at: what is looked at is the fraction of examples whose norm is at most the threshold,
to which noise has been added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gradclip.adaptive.settings import check_between
from gradclip.backends.formats import FLOAT32
from gradclip.backends.registry import entry_of, framework_of, names_of_all
from gradclip.typing import HasDtype, Scalar


class PrivateQuantileState(NamedTuple):
    """The logarithm of the threshold, a float32 scalar. It is a tree of one array, to be carried, saved and loaded."""

    log_norm: Any


@dataclass(frozen=True)
class PrivateQuantile:
    """A threshold C that follows the quantile of the examples' norms: C <- C * exp(-learning_rate * (b - target)).

    Here b, within [0, 1], is the noised fraction of the examples whose norm is at most C. C is kept between `lower` and
    `upper`. It is pure: the state goes in and comes out, in every framework.

    Attributes:
        target: the fraction of examples that are not to be clipped, from 0 to 1.
        learning_rate: how far a step goes: C changes by a factor of exp(learning_rate) at most. Above 0, at most 10.
        initial: the first threshold, in the units of an example's gradient.
        lower: the threshold is at least that, > 0.
        upper: the threshold is at most that, finite. In float32 both bounds are rounded down.

    The fraction costs privacy, too. Noise of `sigma_b` on the count of examples, and of z_delta * C on the sum of
    gradients, cost together what noise of z * C on the gradients alone costs: `gradient_noise` has z_delta.

    Raises:
        TypeError: a field that is no number. ValueError: one out of its range, or bounds that are not in order.

    The method is that of Andrew et al. 2021, algorithm 1; its learning rate there is 0.2.

    >>> rule = PrivateQuantile(initial=1.0)
    >>> state = rule.init()
    >>> state = rule.observe_fraction(state, 0.25)  # three of four examples were clipped
    >>> round(float(rule.max_norm(state)), 4)  # exp(0.2 * 0.25)
    1.0513

    """

    target: float = 0.5
    learning_rate: float = 0.2
    initial: float = 1.0
    lower: float = 1e-6
    upper: float = 1e6

    def __post_init__(self) -> None:
        checked = {
            "target": check_between("target", self.target, 0.0, 1.0),
            "learning_rate": check_between("learning_rate", self.learning_rate, 0.0, 10.0, above_low=True),
            **{
                name: check_between(name, getattr(self, name), FLOAT32.tiny, FLOAT32.largest)
                for name in ("initial", "lower", "upper")
            },
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if not self.lower <= self.initial <= self.upper:
            raise ValueError(
                f"lower <= initial <= upper must hold, got {self.lower!r}, {self.initial!r} and {self.upper!r}."
            )

    def init(self, like: HasDtype | None = None) -> PrivateQuantileState:
        """Return the first state, in the framework and on the device of an array; None means NumPy."""
        like = np.zeros(()) if like is None else like
        framework = framework_of(like)
        if framework is None:
            kind = type(like).__name__
            raise TypeError(f"like must be an array of {names_of_all()}, got {like!r:.80} of type {kind}.")
        zero = framework.namespace.astype(framework.zeros((), like), framework.namespace.float32)
        return PrivateQuantileState(framework.namespace.full_like(zero, math.log(self.initial)))

    def max_norm(self, state: PrivateQuantileState) -> Scalar:
        """Return the threshold of the next step: a float32 scalar of the state's framework."""
        xp = framework_of(state.log_norm).namespace  # type: ignore[union-attr]
        lower, upper = map(FLOAT32.toward_zero, (self.lower, self.upper))
        # The logarithm is rounded: its exponential may lie beyond the bounds, and above 88.72 beyond float32.
        norm = xp.exp(xp.where(state.log_norm > 88.72, 88.72, state.log_norm))
        norm = xp.where(norm < lower, lower, norm)
        return xp.astype(xp.where(norm > upper, upper, norm), state.log_norm.dtype)

    def observe_fraction(self, state: PrivateQuantileState, noised: Scalar) -> PrivateQuantileState:
        """Return the state after a step, of which the noised fraction of the examples that were not clipped is known.

        Args:
            state: what `init` or an earlier call has returned.
            noised: the fraction, with noise, so that it may lie outside of [0, 1]; it is clamped. NaN changes nothing.
                Of m examples with the count `info.num_clipped` of `gradclip.per_example_clip` it is
                1/2 + (m / 2 - num_clipped + noise) / n, the noise normal with the standard deviation sigma_b.

        The n is a public number, as the expected size of a batch; m counts the examples that are there, without
        padding. So one example more or less changes what the noise is added to by 1/2, on which `gradient_noise`
        relies. (n - num_clipped + noise) / n is the same where each batch has n examples; where m varies, as with
        Poisson sampling, one example changes it by 1, and that costs more privacy than `gradient_noise` counts.

        """
        log_norm = state.log_norm
        framework: Any = framework_of(log_norm)
        xp = framework.namespace
        given = noised if entry_of(noised) is entry_of(log_norm) else xp.full_like(log_norm, float(noised))
        fraction = xp.astype(xp.where(given < 1, xp.where(given > 0, given, 0.0), 1.0), log_norm.dtype)
        moved = log_norm - self.learning_rate * (fraction - self.target)
        moved = xp.where(moved < math.log(self.lower), math.log(self.lower), moved)
        moved = xp.where(moved > math.log(self.upper), math.log(self.upper), moved)
        return PrivateQuantileState(xp.astype(xp.where(xp.isnan(given), log_norm, moved), log_norm.dtype))

    @staticmethod
    def gradient_noise(noise_multiplier: float, sigma_b: float) -> float:
        """Return z_delta = (z**-2 - (2 * sigma_b)**-2)**-0.5, the noise multiplier that is left for the gradients.

        Args:
            noise_multiplier: z, of both together: what the accountant is told.
            sigma_b: the standard deviation of the noise on the count of examples that were not clipped, less half of
                all, as `observe_fraction` has it. Andrew et al. take a twentieth of the number of examples in a batch.

        Returns:
            z_delta, a little above z. Noise with the standard deviation z_delta * max_norm goes to the sum of the
            clipped gradients.

        Raises:
            TypeError: what is no number. ValueError: numbers that are not positive and finite, sigma_b <= z / 2.

        >>> round(PrivateQuantile.gradient_noise(1.0, sigma_b=5.0), 4)  # (1 - 0.01)**-0.5
        1.005
        """
        largest = 2.0**100
        z = check_between("noise_multiplier", noise_multiplier, 0.0, largest, above_low=True)
        sigma = check_between("sigma_b", sigma_b, 0.0, largest, above_low=True)
        if 2.0 * sigma <= z:
            raise ValueError(
                f"sigma_b must be above half of the noise multiplier, got sigma_b={sigma_b!r} and "
                f"noise_multiplier={noise_multiplier!r}: the fraction alone would cost all of the privacy, so that no "
                "noise on the gradients would do. Pass a larger sigma_b, such as a twentieth of the number of examples."
            )
        ratio = z / (2.0 * sigma)
        return z / math.sqrt((1.0 - ratio) * (1.0 + ratio))
