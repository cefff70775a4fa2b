"""How examples are clipped and summed, as users say it: checked in one place, before there are any examples."""

import math
import numbers
from typing import Any

from gradclip.arguments import check_flag, check_threshold, is_single_threshold
from gradclip.backends.formats import bare_name
from gradclip.grid import check_grid, check_threshold_of_grid
from gradclip.policy import Nonfinite
from gradclip.quantities import shown
from gradclip.sensitivity import RULES
from gradclip.tree import flatten


def check_options(
    max_norm: Any,
    *,
    per_layer: Any = False,
    uniform: Any = True,
    nonfinite: Any = "skip",
    rule: Any = "clip",
    gamma: Any = 0.01,
    sum_dtype: Any = None,
    grid: Any = None,
    to_unit: Any = False,
) -> None:
    """Raise a TypeError or ValueError where one of the settings is none, or where two do not go together."""
    for name, flag in (("per_layer", per_layer), ("uniform", uniform), ("to_unit", to_unit)):
        check_flag(name, flag)
    Nonfinite.named(nonfinite)
    added_to_norms(rule, gamma)
    checked_dtype(sum_dtype)
    thresholds = _thresholds(max_norm, per_layer=per_layer)
    if to_unit and (per_layer or grid is not None):
        raise ValueError("to_unit=True goes with one norm of an example, without a grid; divide the sum by max_norm.")
    if check_grid(grid) is not None:
        for threshold in thresholds:
            check_threshold_of_grid(threshold)
        if sum_dtype is not None:
            raise ValueError("sums on a grid are int64; leave out sum_dtype.")


def added_to_norms(rule: Any, gamma: Any) -> float | None:
    """Return what a rule adds to norms, None for the rule that leaves small ones as they are."""
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(map(repr, RULES))}, got {shown(rule)}.")
    try:
        number = float(gamma) if isinstance(gamma, numbers.Real) and not isinstance(gamma, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise ValueError(f"gamma must be a finite number > 0, got {shown(gamma)}. For no gamma use rule='normalize'.")
    return {"clip": None, "normalize": 0.0, "automatic": number}[rule]


def checked_dtype(sum_dtype: Any) -> str | None:
    """Return the name of the dtype of sums, None where it follows from the gradients."""
    if sum_dtype is None:
        return None
    name = bare_name(getattr(sum_dtype, "__name__", sum_dtype))
    if name not in ("float32", "float64"):
        raise ValueError(f"sum_dtype must be float32, float64 or None, got {sum_dtype!r}: narrower sums lose examples.")
    return name


def _thresholds(max_norm: Any, *, per_layer: bool) -> list[Any]:
    if is_single_threshold(max_norm):
        return [check_threshold(max_norm)]
    if per_layer:
        raise ValueError("per_layer=True takes one number for max_norm; a tree of thresholds says it all itself.")
    thresholds = list(map(check_threshold, flatten(max_norm).leaves))
    if not thresholds:
        raise ValueError(f"max_norm holds no thresholds, got {shown(max_norm)}. Pass a number, or a tree of numbers.")
    return thresholds
