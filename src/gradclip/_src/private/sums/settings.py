"""The settings of per-example clipping, checked when they are made."""

import math
import numbers
from dataclasses import dataclass
from typing import Any

from gradclip._src.core.formats import FLOAT32, FLOAT64, Format, bare_name
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.rules import Target
from gradclip._src.passed.arguments import check_flag, check_threshold, is_single_threshold
from gradclip._src.private.sums.grid import check_grid, check_threshold_of_grid
from gradclip._src.private.sums.quantities import check_name
from gradclip._src.tree import flatten
from gradclip._src.words import shown
from gradclip.typing import Policy, RuleName, Thresholds, WideDtype

RULES = ("clip", "normalize", "automatic")


@dataclass(frozen=True)
class PerExampleSettings:
    """How each example is clipped, and the dtype of the sums.

    The fields are the arguments of `gradclip.per_example_clip` and documented there. Flags, numbers and dtypes become
    Python booleans, numbers and names. `max_norm` is kept as it was passed: you may change an array later.

    Raises:
        TypeError, ValueError: a field out of range, or fields that exclude each other.

    >>> PerExampleSettings(1.0, rule="automatic", gamma=0.5).target
    Target(length=None, gamma=0.5, share=1.0, integers=False)

    """

    max_norm: Thresholds
    per_layer: bool = False
    uniform: bool = True
    nonfinite: Policy = "skip"
    rule: RuleName = "clip"
    gamma: float = 0.01
    sum_dtype: WideDtype | None = None
    grid: int | None = None
    to_unit: bool = False

    def __post_init__(self) -> None:
        for name in ("per_layer", "uniform", "to_unit"):
            object.__setattr__(self, name, check_flag(name, getattr(self, name)))
        Nonfinite.named(self.nonfinite)
        check_name("rule", self.rule, RULES)
        object.__setattr__(self, "gamma", _checked_gamma(self.gamma))
        object.__setattr__(self, "sum_dtype", _checked_dtype(self.sum_dtype))
        if self.grid is not None:
            object.__setattr__(self, "grid", check_grid(self.grid))
        thresholds = self._thresholds()
        if self.to_unit and (self.per_layer or self.grid is not None):
            raise ValueError(
                "to_unit=True needs one norm per example, not per_layer or grid. Divide the sum by max_norm instead."
            )
        if self.grid is not None:
            for threshold in thresholds:
                check_threshold_of_grid(threshold)
            if self.sum_dtype is not None:
                raise ValueError("sums on a grid are int64. Leave out sum_dtype.")
            if self.policy.spoils:
                raise ValueError(
                    f"nonfinite={self.nonfinite!r} shows an example with NaN by a sum of NaN, but sums on a grid are "
                    "integers. Pass nonfinite='skip', 'zero' or 'raise', or leave out grid."
                )

    @property
    def policy(self) -> Nonfinite:
        """The policy for an example with NaN or infinities."""
        return Nonfinite.named(self.nonfinite)

    @property
    def target(self) -> Target:
        """What an example is scaled to. A grid replaces it by steps, which depend on the number of elements."""
        gamma = {"clip": None, "normalize": 0.0, "automatic": self.gamma}[self.rule]
        return Target(1.0 if self.to_unit else None, gamma)

    @property
    def dtype_of_sums(self) -> str | None:
        """The name of the dtype of the sums; None if it follows from the gradients."""
        if self.grid is not None:
            return "int64"
        return self.sum_dtype if isinstance(self.sum_dtype, str) else None

    @property
    def sum_format(self) -> Format:
        """The narrowest format of sums that are not on a grid."""
        return FLOAT64 if self.sum_dtype == "float64" else FLOAT32

    def _thresholds(self) -> list[Any]:
        if is_single_threshold(self.max_norm):
            return [check_threshold(self.max_norm)]
        if self.per_layer:
            raise ValueError(
                "per_layer=True needs one number as max_norm. To use a tree of thresholds, leave out per_layer."
            )
        thresholds = list(map(check_threshold, flatten(self.max_norm).leaves))
        if not thresholds:
            raise ValueError(
                f"max_norm holds no thresholds, got {shown(self.max_norm)}. Pass a number or a tree of numbers."
            )
        return thresholds


def _checked_gamma(gamma: object) -> float:
    try:
        number = float(gamma) if isinstance(gamma, numbers.Real) and not isinstance(gamma, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise ValueError(f"gamma must be a finite number > 0, got {shown(gamma)}. To use none, pass rule='normalize'.")
    return number


def _checked_dtype(sum_dtype: object) -> str | None:
    if sum_dtype is None:
        return None
    name = bare_name(getattr(sum_dtype, "__name__", sum_dtype))
    if name not in ("float32", "float64"):
        raise ValueError(
            f"sum_dtype must be float32, float64 or None, got {shown(sum_dtype)}. Narrower sums lose examples."
        )
    return name
