"""`PrivateQuantile`: a threshold for private training that follows a quantile of the examples' norms.

The method is from Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping" (NeurIPS). The norms of
a private batch must stay private. So the threshold uses only the fraction of examples with a norm of at most the
threshold, and noise is added to that fraction.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from gradclip._src.annotations import HasDtype, Scalar
from gradclip._src.backends.imported import exportable
from gradclip._src.backends.registry import entry_of, framework_of
from gradclip._src.core.formats import FLOAT32
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.public import public
from gradclip._src.thresholds.history import check_between, framework_like
from gradclip._src.words import advised


@public
@exportable
class PrivateQuantileState(NamedTuple):
    """The logarithm of the threshold, a float32 scalar. It is a tree of one array that you can carry, save and load."""

    log_norm: Any


@public
@advised
@dataclass(frozen=True)
class PrivateQuantile:
    """A threshold C that follows a quantile of the examples' norms: C <- C * exp(-learning_rate * (b - quantile)).

    Here b is the fraction of examples with a norm of at most C, with noise, clamped to [0, 1]. C stays between `lower`
    and `upper`. The rule is functional: you pass the state in and get a new one back, in every framework.

    Attributes:
        quantile: the fraction of examples to leave unclipped, from 0 to 1.
        learning_rate: the size of a step, above 0 and at most 10. C changes by at most a factor of exp(learning_rate).
        initial: the first threshold, in the units of an example's gradient.
        lower: the smallest threshold, > 0.
        upper: the largest threshold, finite. In float32 both bounds are rounded down.

    The fraction costs privacy. Noise of `sigma_b` on the count m / 2 - num_clipped of `observe_fraction` and of
    z_delta * C on the sum of gradients together cost as much as noise of z * C on the gradients alone.
    `gradient_noise` computes z_delta. All this is for adding or removing one example.

    Raises:
        TypeError: a field that is not a number. ValueError: a field out of range, or bounds in the wrong order.

    The method is algorithm 1 of Andrew et al. 2021; its learning rate there is 0.2.

    >>> rule = PrivateQuantile(initial=1.0)
    >>> state = rule.init()
    >>> # Three of four examples were clipped:
    >>> state = rule.observe_fraction(state, 0.25)
    >>> round(float(rule.max_norm(state)), 4)  # exp(0.2 * 0.25)
    1.0513

    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    _: KW_ONLY
    initial: float = 1.0
    lower: float = 1e-6
    upper: float = 1e6

    @with_subnormals
    def __post_init__(self) -> None:
        checked = {
            "quantile": check_between("quantile", self.quantile, 0.0, 1.0),
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

    @with_subnormals
    def init(self, like: HasDtype | None = None) -> PrivateQuantileState:
        """Return the first state, in the framework and on the device of the array `like`; None means NumPy."""
        like = np.zeros(()) if like is None else like
        framework = framework_like(like)
        zero = framework.namespace.astype(framework.zeros((), like), framework.namespace.float32)
        return PrivateQuantileState(framework.namespace.full_like(zero, math.log(self.initial)))

    @with_subnormals
    def max_norm(self, state: PrivateQuantileState) -> Scalar:
        """Return the threshold of the next step: a float32 scalar of the state's framework."""
        xp = framework_of(state.log_norm).namespace  # type: ignore[union-attr]
        lower, upper = map(FLOAT32.toward_zero, (self.lower, self.upper))
        # The logarithm is rounded: its exponential may exceed the bounds, and above 88.72 it overflows float32.
        norm = xp.exp(xp.where(state.log_norm > 88.72, 88.72, state.log_norm))
        norm = xp.where(norm < lower, lower, norm)
        return xp.astype(xp.where(norm > upper, upper, norm), state.log_norm.dtype)

    @with_subnormals
    def observe_fraction(self, state: PrivateQuantileState, noised: Scalar) -> PrivateQuantileState:
        """Return the state after a step, given the noised fraction of examples that were not clipped.

        Args:
            state: the state from `init` or an earlier call.
            noised: the fraction with noise. It may be outside [0, 1] and is clamped. NaN changes nothing. Compute it
                as 1/2 + (m / 2 - num_clipped + noise) / n. m is the number of examples in the batch, without padding.
                num_clipped is `info.num_clipped` of `gradclip.per_example_clip`. The noise is normal, with standard
                deviation sigma_b. n is a public constant, such as the expected batch size.

        With this formula, adding or removing one example changes m / 2 - num_clipped by 1/2, and `gradient_noise`
        relies on that. If every batch has exactly n examples, (n - num_clipped + noise) / n is the same number. If m
        varies, as with Poisson sampling, do not use that shorter formula: one example changes n - num_clipped by 1,
        which costs more privacy than `gradient_noise` accounts for.

        """
        log_norm = state.log_norm
        framework: Any = framework_of(log_norm)
        xp = framework.namespace
        given = noised if entry_of(noised) is entry_of(log_norm) else xp.full_like(log_norm, float(noised))
        fraction = xp.astype(xp.where(given < 1, xp.where(given > 0, given, 0.0), 1.0), log_norm.dtype)
        moved = log_norm - self.learning_rate * (fraction - self.quantile)
        moved = xp.where(moved < math.log(self.lower), math.log(self.lower), moved)
        moved = xp.where(moved > math.log(self.upper), math.log(self.upper), moved)
        return PrivateQuantileState(xp.astype(xp.where(xp.isnan(given), log_norm, moved), log_norm.dtype))

    @staticmethod
    @with_subnormals
    def gradient_noise(noise_multiplier: float, sigma_b: float) -> float:
        """Return the noise multiplier for the gradients, z_delta = (z**-2 - (2 * sigma_b)**-2)**-0.5.

        Args:
            noise_multiplier: z, the noise multiplier of gradients and count together. Report it to the accountant.
            sigma_b: the standard deviation of the noise on the count m / 2 - num_clipped of `observe_fraction`. Andrew
                et al. use a twentieth of the number of examples in a batch.

        Returns:
            z_delta, above z: the smallest float that is not below the exact value. Add noise with standard deviation
            z_delta * max_norm to the sum of the clipped gradients.

        Raises:
            TypeError: a value that is not a number. ValueError: a value that is not positive and finite, or
            sigma_b <= z / 2.

        >>> # (1 - 0.01)**-0.5
        >>> round(PrivateQuantile.gradient_noise(1.0, sigma_b=5.0), 4)
        1.005
        """
        largest = 2.0**100
        z = check_between("noise_multiplier", noise_multiplier, 0.0, largest, above_low=True)
        sigma = check_between("sigma_b", sigma_b, 0.0, largest, above_low=True)
        if 2.0 * sigma <= z:
            raise ValueError(
                f"sigma_b must be above half of the noise multiplier, got sigma_b={sigma_b!r} and "
                f"noise_multiplier={noise_multiplier!r}: the fraction alone would use up the whole privacy budget. "
                "Pass a larger sigma_b, such as a twentieth of the number of examples."
            )
        own, whole = Fraction(z) ** 2, Fraction(2.0 * sigma) ** 2
        # Exact: near its limit the difference would keep few digits in floating point.
        square = own * whole / (whole - own)
        found = z * math.sqrt(square / own) * (1 - 2**-50)
        while Fraction(found) ** 2 < square:
            found = math.nextafter(found, math.inf)
        return found
