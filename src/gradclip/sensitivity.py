"""How far one example, or one group of them, can move a clipped sum."""

import math
from dataclasses import dataclass
from typing import Any

_FACTORS = {"add_or_remove_one": 1.0, "replace_one": 2.0, "zero_out": 1.0}


@dataclass(frozen=True)
class Sensitivity:
    """The L2 `bound` on what one `unit` changes under a `relation`, and the `rounding` of the sum.

    `denominator`: what the sum is divided by, None where it is a sum.

    >>> Sensitivity(2.0, "example", "add_or_remove_one").noise_std(1.5)
    3.0
    """

    bound: float
    unit: str
    relation: str
    denominator: float | None = None
    rounding: float = 0.0

    def noise_std(self, noise_multiplier: float) -> float:
        """Return the standard deviation of the noise: noise_multiplier * (bound + rounding)."""
        return noise_multiplier * (self.bound + self.rounding)


def clipped_sum_sensitivity(
    max_norm: Any,
    relation: str = "add_or_remove_one",
    *,
    unit: str = "example",
    rule: str = "clip",
    per_layer: bool = False,
    normalize_by: float = 1.0,
    to_unit: bool = False,
    batch_size: int | None = None,
    sum_dtype: Any = "float32",
    grid: float | None = None,
) -> Sensitivity:
    """Return the sensitivity of a sum of clipped examples, divided by `normalize_by`."""
    if relation not in _FACTORS:
        raise ValueError(f"relation must be one of {', '.join(_FACTORS)}, got {relation!r}.")
    bound = _FACTORS[relation] * (1.0 if to_unit else float(max_norm)) / normalize_by
    if not math.isfinite(bound):
        raise ValueError(f"a sum that nothing bounds has no sensitivity: max_norm is {max_norm!r}.")
    return Sensitivity(bound, unit, relation, None if normalize_by == 1.0 else normalize_by)
