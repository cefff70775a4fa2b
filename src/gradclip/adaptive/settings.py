"""What users say of thresholds that follow, checked."""

import numbers


def check_between(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> float:
    """Return a number that lies between two others, both allowed unless it must lie above the low one.

    Raises TypeError for what is no real number, ValueError for one that does not lie there, NaN too.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r:.80} of type {type(value).__name__}.")
    number = float(value)
    if not low <= number <= high or (above_low and number == low):
        where = f"above {low!r} and at most" if above_low else f"from {low!r} to"
        raise ValueError(f"{name} must lie {where} {high!r}, got {value!r}.")
    return number


def check_window(name: str, value: object, most: int) -> int:
    """Return a number of norms. Raises TypeError for no whole number, ValueError for one that is not from 1 to most."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r:.80} of type {type(value).__name__}.")
    number = int(value)
    if not 1 <= number <= most:
        raise ValueError(f"{name} must lie from 1 to {most}, got {value!r}.")
    return number
