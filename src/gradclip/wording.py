"""Helpers for the wording of errors."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_MOST_LISTED = 10


def listed(items: Sequence[Any], separator: str = ", ") -> str:
    """Return a list of items for an error: the first ten, and how many more there are."""
    more = len(items) - _MOST_LISTED
    return separator.join([*map(str, items[:_MOST_LISTED]), *([f"and {more} more"] if more > 0 else [])])


def with_advice(function: Callable[P, R]) -> Callable[P, R]:
    """If a call of the function fails on a keyword of another library, make the error name gradclip's own."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            from gradclip.guesses import raise_advice  # loaded only after an error

            raise_advice(function, kwargs)
            raise

    return call
