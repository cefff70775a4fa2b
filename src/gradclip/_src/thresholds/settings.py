"""Checks of the settings of adaptive thresholds."""

import math
import numbers
import operator
from typing import Any

from gradclip._src.backends.registry import framework_of, names_of_all
from gradclip._src.words import typed

_LARGEST_WINDOW = 2**15  # its square fits 32 bits, the only integers JAX has by default


def check_between(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> float:
    """Return a number from `low` to `high`, both allowed; `low` is not allowed with `above_low`.

    Raises TypeError for anything but a real number, ValueError for a number out of range or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {typed(value)}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if operator.gt(value, 0) else -math.inf
    if not low <= number <= high or (above_low and number == low):
        where = f"above {low!r} and at most" if above_low else f"from {low!r} to"
        raise ValueError(f"{name} must be {where} {high!r}, got {value!r}.")
    return number


def check_window(name: str, value: object) -> int:
    """Return a number of norms. Raises TypeError unless it is a whole number, ValueError unless it is 1 to 32,768."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, got {typed(value)}.")
    number = int(value)
    if not 1 <= number <= _LARGEST_WINDOW:
        raise ValueError(f"{name} must be from 1 to {_LARGEST_WINDOW}, got {value!r}.")
    return number


def framework_like(array: object) -> Any:
    """Return the framework of an array that shows where numbers are to be. Raises TypeError for anything else."""
    framework = framework_of(array)
    if framework is None:
        raise TypeError(f"like must be an array of {names_of_all()}, got {typed(array)}.")
    return framework
