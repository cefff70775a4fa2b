"""Rules: which coefficient follows from a norm and a threshold, before it is lowered for what rounding can add.

`coefficient` lowers it, and proves the bound. The kernels and the derivatives are given a `Rule`: they know no other
form.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from gradclip.backends.formats import FLOAT64
from gradclip.backends.values import Array

# Step 3 of the argument in `coefficient`, for arithmetic in float64.
LOWERED = 1.0 - 16.0 * FLOAT64.roundoff


class Rule(NamedTuple):
    """The coefficient of a norm N: `kept` where upper <= keep_up_to, else numerator / upper.

    There upper = N * inflate + offset. Each value is a scalar, or has one entry for each norm.
    """

    inflate: Any
    offset: Any
    keep_up_to: Any
    kept: Any
    numerator: Any

    def upper(self, norms: Array) -> Array:
        """Return what norms are compared with, and divided by."""
        return raised_by(norms, self.inflate, self.offset)


def raised_by(norms: Array, inflate: Any, offset: Any) -> Array:
    """Return norms * inflate + offset."""
    raised = norms if isinstance(inflate, float) and inflate == 1.0 else norms * inflate
    # Not even zero is added where it is known: in compiled code that would be one more operation.
    return raised if isinstance(offset, float) and offset == 0 else raised + offset


@dataclass(frozen=True)
class Target:
    """Which `Rule` follows from a threshold C, of which a negative one counts as 0.

    | target                  | offset | keep_up_to | kept       | numerator |
    |-------------------------|--------|------------|------------|-----------|
    | the threshold           | 0      | C          | 1          | C         |
    | a `length`              | 0      | C * share  | length / C | length    |
    | either, with a `gamma`  | gamma  | none       |            | as above  |

    A length is 1, or the steps of a grid, of which the threshold has a `share` and to whose `integers` the result is
    rounded. With the threshold for a target, what is kept stays bit for bit.
    """

    length: float | None = None
    gamma: float | None = None
    share: float = 1.0
    integers: bool = False

    @property
    def keeps(self) -> bool:
        """Whether elements may stay bit for bit."""
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
        if self.length is not None:  # A choice between two plain numbers would be float32 in PyTorch: it may round up.
            none = max_norm <= 0 if self.integers else max_norm < 0
            numerator = xp.where(none, 0.0, xp.full_like(threshold, self.length))
        if self.gamma is not None:
            return Rule(1.0, self.gamma, -1.0, 0.0, numerator)
        keep_up_to = threshold * self.share
        some = keep_up_to > 0
        return Rule(1.0, 0.0, keep_up_to, xp.where(some, numerator / xp.where(some, keep_up_to, 1.0), 0.0), numerator)


CLIP = Target()


def rule_for_sums(xp: ModuleType, target: Target, max_norm: float | Array, error: float) -> Rule:
    """Return the rule for norms with a relative error, in float64, lowered as in step 3 of the module's docstring."""
    # Below that numbers may be too coarse to be lowered; of narrower elements nothing would be left anyway.
    rule = target.rule(xp, xp.where(max_norm < 2.0**-1000, 0.0, max_norm))
    kept = rule.kept if target.keeps else rule.kept * LOWERED
    return rule._replace(inflate=1.0 / (1.0 - error), kept=kept, numerator=rule.numerator * LOWERED)


# Layers of one size and threshold are weighed alike, which takes longer to find out than to add up a small layer.
@lru_cache(maxsize=64)
def known_rule_for_sums(target: Target, max_norm: float, error: float) -> Rule:
    """Return the same rule in plain numbers."""
    return Rule(*map(float, rule_for_sums(np, target, max_norm, error)))
