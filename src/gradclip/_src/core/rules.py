"""Rules, coefficients and single factors: what becomes of elements that share a norm. Backends receive them.

A rule is the coefficient that follows from a norm and a threshold, before it is lowered for rounding. The kernels and
the derivatives receive a `Rule`; they know no other form. `coefficient` and `one_factor` lower it and prove the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import FLOAT64
from gradclip._src.core.values import Array


class Rule(NamedTuple):
    """The coefficient of a norm N: `kept` if upper <= keep_up_to, else numerator / upper.

    Here upper = N * inflate + offset. Each value is a scalar, or has one entry per norm.
    """

    inflate: Any
    offset: Any
    keep_up_to: Any
    kept: Any
    numerator: Any

    def upper(self, norms: Array) -> Array:
        """Return upper for these norms, which is compared with keep_up_to and divides the numerator."""
        return raised_by(norms, self.inflate, self.offset)

    def keeps(self, norms: Array) -> Array:
        """Return which of these norms keep their elements."""
        return self.upper(norms) <= self.keep_up_to

    def quotient(self, xp: ModuleType, norms: Array) -> Any:
        """Return numerator / upper for a known numerator; 0 if that is 0."""
        upper = self.upper(norms)
        return self.numerator / upper if self.numerator else xp.zeros_like(upper)

    def weights(self, xp: ModuleType, norms: Array, *, in_range: bool = False) -> Array:
        """Return the coefficients of these norms as the kernels compute them: 0 if upper is 0, and never subnormal.

        With `in_range`, the caller promises that no quotient of a known numerator is subnormal, and that elements are 0
        where upper is 0. Then fewer operations give the same products.
        """
        if in_range and isinstance(self.numerator, float):
            # The quotient falls as the norm grows, so `kept` is the smaller one where elements are kept.
            return xp.clip(self.quotient(xp, norms), max=self.kept if self.keep_up_to > 0 else 2.0**1022)
        upper = self.upper(norms)
        quotient = xp.clip(self.numerator / xp.where(upper == 0, math.inf, upper), 0.0, 2.0**1022)
        quotient = xp.where(quotient < FLOAT64.tiny, 0.0, quotient)
        return xp.where(upper <= self.keep_up_to, self.kept, quotient)


def raised_by(norms: Array, inflate: Any, offset: Any) -> Array:
    """Return norms * inflate + offset."""
    raised = norms if isinstance(inflate, float) and inflate == 1.0 else norms * inflate
    # A known zero is not added: in compiled code that would be an extra operation.
    return raised if isinstance(offset, float) and offset == 0 else raised + offset


@dataclass(frozen=True)
class Factors:
    """The factors that elements are multiplied by, one after the other; a `second` of None is 1."""

    first: Any
    second: Any = None


@dataclass(frozen=True)
class Coefficient:
    """What happens to the elements that share a norm. Each value is a scalar, or has one entry per norm.

    `keep`: the elements stay bit-identical. `blank`: they become zeros. Otherwise they are multiplied: float32 and the
    half types by `narrow`, in float32; all others, and sums over examples, by `wide`.
    """

    keep: Any
    blank: Any
    wide: Factors
    narrow: Factors

    def weights(self, xp: ModuleType) -> Factors:
        """Return the factors of a sum over examples: 1 for kept examples."""
        return Factors(xp.where(self.keep, 1.0, self.wide.first), self.wide.second)

    def factors(self) -> list[Any]:
        """Return the two factors of wide formats, then the two of narrow formats."""
        return [self.wide.first, self.wide.second, self.narrow.first, self.narrow.second]

    def mapped(self, change: Callable[[Any], Any]) -> Coefficient:
        """Return the coefficient with each of its values changed."""
        factors = [None if one is None else change(one) for one in self.factors()]
        return Coefficient(change(self.keep), change(self.blank), Factors(*factors[:2]), Factors(*factors[2:]))

    def spoiled(self, xp: ModuleType, finite: Array) -> Coefficient:
        """Return the coefficient with NaN wherever `finite` is False."""
        wide = replace(self.wide, first=xp.where(finite, self.wide.first, xp.nan))
        narrow = replace(self.narrow, first=xp.where(finite, self.narrow.first, xp.nan))
        return replace(self, keep=self.keep & finite, wide=wide, narrow=narrow)


@dataclass(frozen=True)
class OneFactor:
    """The numbers that multiply all elements: 1 if they stay unchanged, NaN if all become NaN.

    `factors` has a number for each dtype, by name: float64 for float64, float32 for all others. `alive`: where it is
    False, all products become zeros, NaN too; None if that never happens. `steps`: -1 if float16 products are stepped,
    0 if they are kept, None if nothing is stepped. With `sizes` these are vectors: the first sizes[0] arrays use the
    first number, and so on.
    """

    factors: dict[str, Any]
    alive: Any = None
    steps: Any = None
    sizes: Sequence[int] | None = None

    @property
    def blanks(self) -> bool:
        """Whether products that are NaN become zeros."""
        return self.alive is not None


class Into(NamedTuple):
    """Where results are to lie: in the memory of `arrays`, which is that of `leaves`, the objects that users hold.

    Leaves that cannot be written are replaced. Without leaves, the memory belongs to nobody else.
    """

    arrays: Arrays
    leaves: Any = None  # a sequence, or None


class Seen(NamedTuple):
    """What a norm shows: whether it is finite, above the threshold, and above so many times the threshold.

    `final`: no narrower dtype that users get the norm in says otherwise.
    """

    finite: Any
    above: Any
    spike: Any
    final: bool = False


# Step 3 of the proof in `coefficient`, in units of the roundoff, and for arithmetic in float64.
LOWERED_BY = 16.0
LOWERED = 1.0 - LOWERED_BY * FLOAT64.roundoff


@dataclass(frozen=True)
class Target:
    """Which `Rule` follows from a threshold C; a negative C counts as 0.

    | target                  | offset | keep_up_to | kept       | numerator |
    |-------------------------|--------|------------|------------|-----------|
    | the threshold           | 0      | C          | 1          | C         |
    | a `length`              | 0      | C * share  | length / C | length    |
    | either, with a `gamma`  | gamma  | none       |            | as above  |

    A length is 1, or the number of steps of a grid; then the threshold has a `share` in steps, and the result is
    rounded to `integers`. If the target is the threshold, kept elements stay bit-identical.
    """

    length: float | None = None
    gamma: float | None = None
    share: float = 1.0
    integers: bool = False

    @property
    def keeps(self) -> bool:
        """Whether elements may stay bit-identical."""
        return self.length is None and self.gamma is None

    @property
    def follows(self) -> bool:
        """Whether the numerator is the threshold."""
        return self.length is None

    def rule(self, xp: ModuleType, max_norm: Any) -> Rule:
        """Return the rule of a threshold, for norms without an error."""
        threshold = xp.where(max_norm < 0, 0.0, max_norm)
        if self.length is None and self.gamma is None:
            return Rule(1.0, 0.0, threshold, 1.0, threshold)
        numerator = threshold
        if self.length is not None:  # In PyTorch, a choice between two plain numbers is float32, which may round up.
            none = max_norm <= 0 if self.integers else max_norm < 0
            numerator = xp.where(none, 0.0, xp.full_like(threshold, self.length))
        if self.gamma is not None:
            return Rule(1.0, self.gamma, -1.0, 0.0, numerator)
        keep_up_to = threshold * self.share
        some = keep_up_to > 0
        return Rule(1.0, 0.0, keep_up_to, xp.where(some, numerator / xp.where(some, keep_up_to, 1.0), 0.0), numerator)


CLIP = Target()


def rule_for_sums(xp: ModuleType, target: Target, max_norm: float | Array, error: float) -> Rule:
    """Return the rule for norms with a relative error, in float64, lowered as in step 3 of `coefficient`'s proof."""
    # Smaller numbers may be too coarse to lower; narrower elements would become zeros anyway.
    rule = target.rule(xp, xp.where(max_norm < 2.0**-1000, 0.0, max_norm))
    kept = rule.kept if target.keeps else rule.kept * LOWERED
    return rule._replace(inflate=1.0 / (1.0 - error), kept=kept, numerator=rule.numerator * LOWERED)


# Cached: layers of equal size and threshold share a rule, and computing it takes longer than adding a small layer.
@lru_cache(maxsize=64)
def known_rule_for_sums(target: Target, max_norm: float, error: float) -> Rule:
    """Return the same rule in plain numbers."""
    return Rule(*map(float, rule_for_sums(np, target, max_norm, error)))
