"""Checks of arguments about sums: numbers (including NumPy's), counts, divisors, dtypes and names."""

import math
import numbers
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from gradclip._src.backends.registry import framework_of
from gradclip._src.core.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Format, bare_name
from gradclip._src.private.sums.rounding import rounded_up
from gradclip._src.words import shown, typed

_LARGEST_COUNT = 2**63 - 1
_WIDE = {"float32": FLOAT32, "float64": FLOAT64}
_HALF = {"float16": FLOAT16, "bfloat16": BFLOAT16}


def as_number(name: str, value: object) -> float:
    """Return a number, rounded up to float64.

    Raises TypeError for anything but a real number, ValueError for a number beyond float64's range.
    """
    given = _scalar(name, value)
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise TypeError(f"{name} must be a number, got {typed(value)}.")
    if given != given or given in (math.inf, -math.inf):
        return float(given)
    number = rounded_up(Fraction(*given.as_integer_ratio()))  # type: ignore[attr-defined]
    if math.isinf(number):
        raise ValueError(f"{name} must be a number within float64's range, got {shown(value)}.")
    return number


def as_count(name: str, value: object) -> int:
    """Return a count as an int. Raises ValueError for anything but a whole number from 1 to 2**63 - 1."""
    given = _scalar(name, value)
    whole = isinstance(given, numbers.Integral) and not isinstance(given, bool)
    if not (whole and 1 <= given <= _LARGEST_COUNT):
        limit = ", at most 2**63 - 1" if whole and given > 1 else ""
        raise ValueError(f"{name} must be a whole number, 1 or more{limit}, got {shown(value)}.")
    return int(given)


def as_number_of_examples(name: str, value: object) -> int:
    """Return a number of examples as an int. Raises TypeError if it is not a number, else as `as_count`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a whole number, 1 or more, got {typed(value)}.")
    return as_count(name, value)


def as_divisor(name: str, value: object, sums: Format) -> float:
    """Return a constant by which sums of a format can be divided.

    Raises TypeError for anything but a number. Raises ValueError if the number or its inverse is not a normal number
    of the format: compilers multiply by the inverse, and the result would be infinity or all zeros.
    """
    number = as_number(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite, the constant that sums are divided by, got {value!r}.")
    if not sums.tiny <= number <= 1 / sums.tiny:
        wider = "" if sums.precision == 53 else " For sums in float64, pass sum_dtype='float64'."
        raise ValueError(
            f"{name} must be from {sums.tiny:g} to {1 / sums.tiny:g} to divide sums in {sums.name}, got "
            f"{value!r}.{wider}"
        )
    return number


def as_format(name: str, dtype: object, *, narrow: bool = False) -> Format:
    """Return the format of a dtype: its name, a framework's dtype, or a scalar type of NumPy or JAX.

    Raises ValueError unless it is float32 or float64, or with `narrow` also float16 or bfloat16.
    """
    known = _WIDE | _HALF if narrow else _WIDE
    found = bare_name(str(getattr(dtype, "__name__", dtype)))
    if found not in known:
        *first, last = known
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {shown(dtype)}.")
    return known[found]


def check_function(name: str, value: object) -> None:
    """Raise a TypeError for anything but a function."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {typed(value)}.")


def check_name(what: str, name: object, known: Sequence[str]) -> None:
    """Raise a ValueError for an unknown name."""
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, known))}, got {shown(name)}.")


def _scalar(name: str, value: object) -> Any:
    """Return the number in a framework's scalar array, and any other value unchanged.

    Raises TypeError for a traced array.
    """
    framework = framework_of(value)
    if framework is not None and framework.is_traced(value):
        raise TypeError(f"{name} must be a constant, got a traced array. Pass a Python number.")
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
