"""Rules: the coefficient that follows from a norm and a threshold, before it is lowered for rounding.

`coefficient` lowers it and proves the bound. The kernels and the derivatives receive a `Rule`; they know no other form.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from gradclip._src.core.formats import FLOAT64
from gradclip._src.core.records import Rule
from gradclip._src.core.values import Array

# Step 3 of the proof in `coefficient`, for arithmetic in float64.
LOWERED = 1.0 - 16.0 * FLOAT64.roundoff


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
