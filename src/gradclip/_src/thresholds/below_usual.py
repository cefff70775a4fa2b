"""`SpreadRule` and `SteadyRule`: thresholds below the usual norm. `AdaptiveThreshold` uses the first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

from gradclip._src.annotations import HasDtype, Scalar
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.public import public
from gradclip._src.thresholds.following import FollowingRule, fraction_of, recovery_steps
from gradclip._src.thresholds.history import AnyHistory, SteadyHistory, namespace_of, of_one_norm
from gradclip._src.thresholds.quantile import QuantileRule
from gradclip._src.words import advised, typed, with_advice

_LEAST = 0.25


@public
@advised
@dataclass(frozen=True)
class SpreadRule(FollowingRule):
    """A threshold that follows the norms, lower where they vary: factor * m * r**2, limited to [lower, upper].

    Here m is the median of the last `window` norms, and r = max(q / m, 1/4), where q is their `quantile`. r is 1 if the
    norms are equal. It falls as they spread, and while their level rises. So with the default factor most steps are
    clipped, and training is as if all steps had about the same length: shorter where the norms vary much, because the
    usual step is too long. The threshold is between factor * m / 16 and factor * m.

    `gradclip.QuantileRule` limits spikes only. It suits runs that train well without clipping, at the learning
    rate that was found without it. With SGD, a `SpreadRule` may need a higher rate.

    Attributes:
        factor: what the median is multiplied by, from 2**-64 to 2**64.
        quantile: the low quantile q, from 0 to 0.5.
        window: the number of norms kept, 1 to 32,768. The threshold follows a rise only after most of these steps.
        initial, lower, upper: as in `gradclip.QuantileRule`.

    **It always recovers.** Let K = `recovery_steps`, which is 231 for the defaults. After any history, once K finite
    positive norms in [a, b] have been observed, the threshold is in [factor * a * max(a / b, 1/4)**2, factor * b], up
    to rounding, limited to [lower, upper].

    Proof. Each of q and m is a quantile of the window. By the proof of `gradclip.QuantileRule`, after K norms both
    are in [a, b], because K is the larger of their two numbers. As quantile is at most 0.5, q is at most m. So r is at
    most 1 and at least max(a / b, 1/4), and m * r**2 is at least a * max(a / b, 1/4)**2 and at most b.

    Norms and thresholds are rounded as in `gradclip.QuantileRule`; equal norms give the same threshold in every
    framework. A norm is kept if it and the thresholds from factor / 16 to factor times it are within the range there.
    The rule and its defaults are gradclip's own: `benchmarks/training.py` compares them with other rules.

    Raises:
        TypeError: a field that is not a number. ValueError: a field out of range, or `lower` above `upper`.

    >>> rule = SpreadRule()
    >>> history = rule.init()
    >>> for norm in (4.0, 4.0, 4.0):
    ...     history = rule.observe(history, norm)
    >>> float(rule.max_norm(history))  # steady norms: their median
    4.0
    >>> for norm in (2.0, 8.0):
    ...     history = rule.observe(history, norm)
    >>> float(rule.max_norm(history))  # the lowest is half the median: 4 / 2**2
    1.0

    """

    _least_share: ClassVar[float] = _LEAST**2
    _below_usual: ClassVar[bool] = True

    factor: float = 1.0
    quantile: float = 0.1
    _: KW_ONLY
    window: int = 256
    initial: float = math.inf
    lower: float = 0.0
    upper: float = math.inf
    _middle: tuple[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantile > 0.5:
            raise ValueError(
                f"quantile must be at most 0.5, got {self.quantile!r}. It is compared with the median, which must not "
                "be below it."
            )
        object.__setattr__(self, "_middle", fraction_of(0.5, self.window))

    @property
    def recovery_steps(self) -> int:
        """K: after this many finite positive norms at one level, the threshold has reached it, whatever came before.

        >>> SpreadRule().recovery_steps
        231
        """
        return max(recovery_steps(fraction, self.window) for fraction in (self._fraction, self._middle))

    def _of(
        self, smallest: Callable[[tuple[int, int]], Any], factor: Scalar, at_least: Callable[[Any, float], Any]
    ) -> Any:
        low, middle = smallest(self._fraction), smallest(self._middle)
        share = at_least(low / middle, _LEAST)
        # The factor first: no product is then smaller than the norm and the threshold, which are normal.
        return middle * factor * share * share


def rule_given(rule: FollowingRule | None, *, skips: bool) -> FollowingRule:
    """Return the given rule, or the default: a `SpreadRule`, or a `QuantileRule` if steps are skipped.

    Raises ValueError for a rule that may be far below the usual norm if steps are skipped, TypeError for no rule.
    """
    if rule is None:
        return QuantileRule() if skips else SpreadRule()
    if not isinstance(rule, FollowingRule):
        raise TypeError(
            f"rule must be a gradclip.SpreadRule, SteadyRule or QuantileRule, or None for the default, got "
            f"{typed(rule)}. A fixed threshold needs no rule: pass the number as max_norm when you clip."
        )
    if skips and rule._below_usual:
        raise ValueError(
            f"skip_above needs a threshold above the usual norm, but a {type(rule).__name__} may be far below it. "
            "Pass rule=gradclip.QuantileRule(), or leave rule out."
        )
    return rule


_DOWN, _UP = 8.0, 4.0


@public
@advised
@dataclass(frozen=True)
class SteadyRule(FollowingRule):
    """A threshold far below the norms that stays the same: factor * the first norm, moved only if it no longer fits.

    Let m be the `quantile` of the last `window` norms, by default their median. The threshold stays, to the last bit,
    while it is from factor / 8 to 4 * factor times m: by default from m / 64 to m / 2. Otherwise it moves to the nearer
    of these ends. So nearly every step is clipped, and all steps have the same norm.

    It is for Adam and other optimizers that divide by the size of earlier gradients. They do not care how long all
    steps are, but a step that is longer than the others makes them slow for as long as they remember it. `initial` is
    small for the same reason: otherwise the first step would be longer than all others. With SGD, the threshold is part
    of the learning rate, so there use a `gradclip.SpreadRule`.

    Attributes:
        factor: what the first norm is multiplied by, from 2**-64 to 2**64.
        quantile, window, lower, upper: as in `gradclip.QuantileRule`.
        initial: the threshold of the first step, in the units of the gradients. Above the first norm, it clips nothing.

    **It always recovers.** Let K = `recovery_steps`, which is 65 for the defaults. After any history, once K finite
    positive norms in [a, b] have been observed, the threshold is in [factor / 8 * a, 4 * factor * b], up to rounding,
    limited to [lower, upper]. NaN, infinities and zeros in between do not matter, and K - 1 norms are not enough.

    Proof. By the proof of `gradclip.QuantileRule`, m is in [a, b] after K norms. Each observation moves the
    threshold into [factor / 8 * m, 4 * factor * m], wherever it was. The first norm decides only where in that range.
    K - 1 norms may leave m outside [a, b] by any factor, as shown there, and the threshold follows.

    Norms and thresholds are rounded as in `gradclip.QuantileRule`; equal norms give the same threshold in every
    framework. A norm is kept if it and the thresholds from factor / 8 to 4 * factor times it are within the range
    there. The rule and its defaults are gradclip's own: `benchmarks/training.py` compares them with other rules.

    Raises:
        TypeError: a field that is not a number. ValueError: a field out of range, or `lower` above `upper`.

    >>> rule = SteadyRule()
    >>> history = rule.init()
    >>> for norm in (8.0, 5.0, 4.0, 30.0, 3.0):
    ...     history = rule.observe(history, norm)
    >>> float(rule.max_norm(history))  # an eighth of the first norm
    1.0
    >>> for _ in range(6):
    ...     history = rule.observe(history, 1.0)
    >>> float(rule.max_norm(history))  # the median has fallen to 1: half of it
    0.5

    """

    _least_share: ClassVar[float] = 1 / _DOWN
    _most_share: ClassVar[float] = _UP
    _below_usual: ClassVar[bool] = True
    _arrays: ClassVar[int] = 3

    factor: float = 0.125
    quantile: float = 0.5
    _: KW_ONLY
    window: int = 128
    initial: float = 0.01
    lower: float = 0.0
    upper: float = math.inf

    @with_advice
    def init(self, like: HasDtype | None = None, shape: tuple[int, ...] = ()) -> SteadyHistory:
        """Return an empty history, as `gradclip.QuantileRule.init` does."""
        norms, count = super().init(like, shape)[:2]
        return SteadyHistory(norms, count, namespace_of(norms).full_like(norms[..., 0], 0.0))

    @with_subnormals
    def max_norm(self, history: SteadyHistory) -> Scalar:  # type: ignore[override]
        """Return the threshold for the next step, as `gradclip.QuantileRule.max_norm` does."""
        norms, count = self._own(history)
        held = history[2]
        if of_one_norm(norms):
            return self._number_within(norms.dtype.type, int(count), held)
        return self._within(norms, count[..., None], held[..., None])[..., 0]

    @with_subnormals
    def observe(self, history: SteadyHistory, norm: Scalar | Sequence[Scalar]) -> SteadyHistory:  # type: ignore[override]
        """Add a norm before clipping, as `gradclip.QuantileRule.observe` does, and move the threshold if need be.

        Args:
            history: the history from `init` or an earlier call.
            norm: a scalar, or the norms of layers.

        """
        return self._holding(super().observe(history, norm), history[2])

    def _holding(self, seen: AnyHistory, held: Any) -> SteadyHistory:
        """Return these norms with a threshold, moved to where it fits them."""
        norms, count = seen[:2]
        if of_one_norm(norms):
            as_held = norms.dtype.type
            if not count:
                return SteadyHistory(norms, count, as_held(0))
            level = self._quantile_number(norms, int(count)) * as_held(self.factor)
            low, high = level / as_held(_DOWN), level * as_held(_UP)
            return SteadyHistory(norms, count, min(max(as_held(held) or level, low), high))
        xp, some = namespace_of(norms), count[..., None] > 0
        held, level = held[..., None], self._quantile_array(norms, count) * self.factor
        found = xp.where(held > 0, held, level)
        found = xp.where(found < level / _DOWN, level / _DOWN, found)
        found = xp.where(found > level * _UP, level * _UP, found)
        return SteadyHistory(norms, count, xp.where(some, found, xp.zeros_like(found))[..., 0])
