"""The arguments `where` and `integers`: the leaves that a call chooses by name, and what it does with integers."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache, partial

from gradclip._src.flush_mode import being_compiled
from gradclip._src.words import listed, shown, typed
from gradclip.typing import Integers, Where


@dataclass(frozen=True)
class Choice:
    """Which leaves are chosen, by their names, and whether integers among them are an error. None: all are chosen.

    `alone`: no other process, and no other part of the gradient, may have leaves that are chosen.
    """

    where: Where = None
    integers: Integers = "keep"
    alone: bool = True

    def __post_init__(self) -> None:
        if self.integers not in ("keep", "raise"):
            raise ValueError(
                f"integers must be 'keep', which leaves integers as they are, or 'raise', which refuses them, got "
                f"{shown(self.integers)}."
            )
        if isinstance(self.where, list):
            object.__setattr__(self, "where", tuple(self.where))
        if self.where is None or callable(self.where) or self.patterns:
            return
        if not isinstance(self.where, tuple) or self.where:
            raise TypeError(
                "where must be a pattern of names such as 'encoder.*', a list of patterns, or a function that says of "
                f"a name whether it is chosen, got {typed(self.where)}."
            )

    @property
    def refuses(self) -> bool:
        """Whether integers are an error."""
        return self.integers == "raise"

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns; empty if there are none, or something that is no string among them."""
        given = (self.where,) if isinstance(self.where, str) else self.where
        return given if isinstance(given, tuple) and all(isinstance(one, str) for one in given) else ()

    @property
    def told(self) -> list[tuple[str, str]]:
        """The arguments that must be the same on all processes, with names."""
        if self is EVERY or self == EVERY:
            return []
        return [("where", repr("a function" if callable(self.where) else self.where)), ("integers", self.integers)]

    def left(self, names: Sequence[str]) -> set[int]:
        """Return the places of the names that are not chosen.

        Raises ValueError if none is chosen, or if a pattern matches none, unless others may have the names.
        """
        if self.where is None:
            return set()
        idle: Collection[str] = ()
        if callable(self.where):
            where = self.where
            left = {place for place, name in enumerate(names) if not where(name)}
        else:
            find = partial(_unmatched, matches) if being_compiled() else _found
            found, idle = find(tuple(names), self.patterns)
            left = set(found)
        if self.alone and len(left) == len(names):
            raise ValueError(self.no_match(names))
        if self.alone and idle:
            raise ValueError(
                f"where has {listed(list(map(repr, idle)), ' and ')}, which matches none of the names: "
                f"{listed(names)}. Correct it or leave it out."
            )
        return left

    def no_match(self, names: Sequence[str]) -> str:
        """Say that no name is chosen."""
        what = (
            "the function"
            if callable(self.where)
            else listed(list(map(repr, self.patterns)), " or ") or "an empty list"
        )
        return (
            f"where chooses none of the names: {what} matches none of {listed(names) or 'none, for there are none'}. "
            "Correct it, or leave where= out to choose all."
        )


EVERY = Choice()


def choice_of(where: Where, integers: Integers) -> Choice:
    """Return the choice that the arguments make, checked. Raises TypeError and ValueError."""
    return EVERY if where is None and integers == "keep" else Choice(where, integers)


# Cached: matching takes longer than clipping.
@lru_cache(maxsize=64)
def _found(names: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[frozenset[int], tuple[str, ...]]:
    return _unmatched(fnmatchcase, names, patterns)


def _unmatched(
    match: Callable[[str, str], bool], names: Sequence[str], patterns: Sequence[str]
) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return the places of names that no pattern matches, and the patterns that match no name."""
    matched = [{place for place, name in enumerate(names) if match(name, pattern)} for pattern in patterns]
    chosen = {place for places in matched for place in places}
    idle = [pattern for pattern, places in zip(patterns, matched, strict=True) if not places]
    return frozenset(place for place in range(len(names)) if place not in chosen), tuple(idle)


def matches(name: str, pattern: str) -> bool:
    """Return what `fnmatchcase` returns. PyTorch can compile this, but neither regular expressions nor caches."""
    place, at, star, tried = 0, 0, -1, 0
    while place < len(name):
        width = _width(pattern, at, name[place])
        if pattern[at : at + 1] == "*":
            star, tried = at, place
            at += 1
        elif width:
            place, at = place + 1, at + width
        elif star >= 0:  # the last star takes one character more; earlier ones need not
            tried += 1
            place, at = tried, star + 1
        else:
            return False
    return not pattern[at:].strip("*")


def _width(pattern: str, at: int, character: str) -> int:
    """Return how long the part of the pattern here is that stands for one character; 0 if it is not this one."""
    first = pattern[at : at + 1]
    end = pattern.find("]", at + (3 if pattern[at + 1 : at + 2] == "!" else 2)) if first == "[" else -1
    if end > 0:
        return (end + 1 - at) * _is_in(character, pattern[at + 1 : end])
    return int(first in ("?", character))


def _is_in(character: str, inside: str) -> bool:
    """Say whether a character is in the brackets of a pattern, such as `a-cx`, or `!a-cx`."""
    found, place, other = False, 0, inside.startswith("!")
    inside = inside[other:]
    while place < len(inside):
        is_range = inside[place + 1 : place + 2] == "-" and place + 2 < len(inside)
        found = found or inside[place] <= character <= inside[place + 2 * is_range]
        place += 3 if is_range else 1
    return found != other
