"""The numbers of a partial norm as JSON, which has no NaN and no infinities, and the check of those that arrive."""

import math
import numbers
from typing import Any

from gradclip._src.words import typed


def number(name: str, value: object) -> float:
    """Return a number as a float. Raises TypeError if it is not a number, ValueError if it is too large."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must hold numbers, got {typed(value)}.")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must hold numbers in the range of float64, got a larger one.") from None


def plain(value: float) -> float | str:
    """Return a number as JSON can hold it: a non-finite one as text."""
    return value if math.isfinite(value) else str(float(value))


def from_plain(value: object) -> Any:
    """Return the number that `plain` wrote, or anything else unchanged."""
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value


def refuse_constant(name: str) -> None:
    """Raise a ValueError for a constant that JSON lacks, such as NaN."""
    raise ValueError(f"{name} is not valid JSON. Write it as a string.")
