"""How errors say things."""

from collections.abc import Sequence
from typing import Any

_MOST_LISTED = 10


def listed(items: Sequence[Any], separator: str = ", ") -> str:
    """Return what an error says of many things: the first ten, and how many more there are."""
    more = len(items) - _MOST_LISTED
    return separator.join([*map(str, items[:_MOST_LISTED]), *([f"and {more} more"] if more > 0 else [])])
