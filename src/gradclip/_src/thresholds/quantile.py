"""`QuantileRule`: a threshold that is a multiple of a quantile of the last norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from gradclip._src.annotations import Scalar
from gradclip._src.public import public
from gradclip._src.thresholds.following import FollowingRule
from gradclip._src.words import advised


@public
@advised
@dataclass(frozen=True)
class QuantileRule(FollowingRule):
    """A threshold that follows the norms: factor * (quantile of the last `window` norms), limited to [lower, upper].

    With c norms in the history, the quantile is the k-th smallest norm, k = max(1, ceil(quantile * c)). Only finite
    positive norms are kept, so NaN, infinities and zeros change nothing.

    Attributes:
        factor: what the quantile is multiplied by, from 2**-64 to 2**64. With 2 and the median, a gradient is clipped
            if its norm is more than twice the usual norm.
        quantile: from 0 (the smallest norm) to 1 (the largest). It is read as the decimal that Python prints for it.
        window: W, the number of norms kept, 1 to 32,768.
        initial: the threshold before the first norm is observed. `inf` clips nothing.
        lower: the smallest threshold, in the units of the gradients.
        upper: the largest threshold. `lower` and `upper` also limit `initial`. In float32 all three are rounded down.

    **It always recovers.** Let k = max(1, ceil(quantile * W)) and K = max(k, W - k + 1). `recovery_steps` is K, which
    is 65 for the defaults. After any history, once K finite positive norms in [a, b] have been observed, the threshold
    is in [factor * a, factor * b], limited to [lower, upper], up to the rounding described below. Norms in between that
    are not finite or not positive do not matter. K - 1 norms are not always enough.

    Proof. Of the c <= W norms in the window, K are in [a, b] and at most c - K are not. The threshold is computed from
    the k_c-th smallest, k_c = max(1, ceil(quantile * c)). One norm more raises ceil(quantile * c) by at most 1, so
    k_c >= k - (W - c) >= c - K + 1. Even if the c - K other norms are all smaller, the k_c-th smallest is not among
    them, so it is at least a. Also k_c <= k <= K, so at least k_c norms are at most b. K - 1 are not always enough. If
    K = k: among K - 1 norms in [a, b] and W - K + 1 larger norms, the k-th smallest is one of the larger norms. If
    K = W - k + 1: among K - 1 norms in [a, b] and k smaller norms, the k-th smallest is one of the smaller norms.

    This does not protect against a wrong level: every level that lasts is accepted. Set `upper` to limit it. A well
    chosen fixed threshold trains as well; the gain is that you need not choose one.

    Equal norms give the same threshold, to the last bit, in every framework and every process. The history is float32,
    or float64 if `init` gets a float64 array. The norm, the factor and their product are each rounded to that dtype, to
    nearest. So the threshold of a norm that has that dtype may differ from factor * norm by a relative 1.2e-7 in
    float32 and 2.3e-16 in float64. The history has no derivative. Norms near the ends of that dtype's
    range are not kept. A norm is kept if it and the threshold computed from it are within [2**-125, 2**125] in float32,
    or [2**-1021, 2**1021] in float64.

    Raises:
        TypeError: a field that is not a number. ValueError: a field out of range, or `lower` above `upper`.

    >>> rule = QuantileRule(factor=2.0, window=4)
    >>> history = rule.init()
    >>> for norm in (3.0, float("nan"), 5.0, 0.0, 4.0):
    ...     history = rule.observe(history, norm)
    >>> float(rule.max_norm(history))  # twice the median of 3, 5 and 4
    8.0

    """

    factor: float = 2.0
    quantile: float = 0.5
    _: KW_ONLY
    window: int = 128
    initial: float = math.inf
    lower: float = 0.0
    upper: float = math.inf

    def _of(
        self, smallest: Callable[[tuple[int, int]], Any], factor: Scalar, at_least: Callable[[Any, float], Any]
    ) -> Any:
        return smallest(self._fraction) * factor
