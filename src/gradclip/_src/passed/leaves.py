"""Which leaves of a tree count as gradients, or of those chosen by name. The others come back as they are.

| leaf                                          | norms and clipping       | sums over examples                      |
|-----------------------------------------------|--------------------------|-----------------------------------------|
| floating-point or complex array, Python float | counts                   | counts                                  |
| integer or boolean array, Python int or bool  | left as it is, no norm   | an error: unclipped, it would be public |
| JAX's `float0`, which holds no numbers        | left as it is, no norm   | its sum is `float0` too                 |

A tree whose only numbers are integers is an error: nothing would be clipped. Libraries whose own functions count
integers convert them first, with `as_floats`; those that refuse them call `without_integers`.
"""

import warnings
from collections.abc import Callable, Collection, Hashable, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from typing import Any

import numpy as np

from gradclip._src.annotations import Integers, Tree, Where
from gradclip._src.backends.registry import entries_of, framework_of, known, load
from gradclip._src.core.arrays import Arrays, raise_named
from gradclip._src.core.formats import bare_name, dtype_name, is_empty_name, is_integer_name
from gradclip._src.core.layouts import Groups
from gradclip._src.core.protocols import Backend, HostBackend
from gradclip._src.flush_mode import being_compiled
from gradclip._src.tree import FlatTree, Sparse, dotted, flatten
from gradclip._src.words import listed, shown, typed


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


def counted(tree: object, choice: Choice = EVERY) -> FlatTree:
    """Flatten a tree of gradients, leaving integers, and leaves that are not chosen, as they are.

    Raises TypeError if all its numbers are integers, or if integers are refused, and ValueError if nothing is chosen.
    """
    flat = flatten(tree)
    left = choice.left(names_in(flat)) if choice.where is not None else set()
    chosen, integers = _without(flat, left, choice)
    if integers and not chosen.leaves:
        what = "the tree holds" if choice.where is None else "where chooses"
        raise TypeError(f"{what} no floating-point numbers, so there is nothing to clip: {integers}")
    return chosen


def counted_part(tree: object, choice: Choice = EVERY) -> FlatTree:
    """Flatten a part of a gradient likewise. Warns if nothing of it counts: other parts may hold the rest."""
    flat = flatten(tree)
    names = names_in(flat) if choice.where is not None else ()
    left = replace(choice, alone=False).left(names) if names else set()
    chosen, integers = _without(flat, left, choice)
    why = ""
    if names and len(left) == len(names):
        why = f"nothing of this part counts or is clipped: {choice.no_match(names)}"
    elif integers and not chosen.leaves:
        what = "this part holds no" if choice.where is None else "of this part, where chooses no"
        why = f"{what} floating-point numbers, so nothing of it counts or is clipped: {integers}"
    if why:
        warnings.warn(why, UserWarning, stacklevel=4)
    return chosen


def _without(flat: FlatTree, left: Set[int], choice: Choice) -> tuple[FlatTree, str]:
    """Return the tree with these leaves and integers left as they are, and how errors name the other integers.

    They are named only if nothing is left to clip. Raises TypeError if integers are refused.
    """
    chosen = flat.leaving(_where(flat, _is_left) | left)
    integers = _where(flat, _holds_integers) - left if choice.refuses or not chosen.leaves else ()
    if choice.refuses and integers:
        raise TypeError(f"integers='raise' refuses integers: {_integers(flat, integers)}")
    return chosen, _integers(flat, integers) if integers else ""


def names_in(flat: FlatTree) -> tuple[str, ...]:
    """Return the name of each leaf that counts, which patterns match: `layer.0` for `['layer'][0]`."""
    shorten = dotted.__wrapped__ if being_compiled() else dotted  # PyTorch warns of caches
    return shorten(tuple(flat.paths()))


def summed(tree: object) -> FlatTree:
    """Flatten a tree of per-example gradients. Raises a TypeError that names its integers.

    In place of arrays without numbers are their sums over the first axis.
    """
    flat = flatten(tree)
    integers = _where(flat, _holds_integers)
    if integers:
        raise TypeError(
            "integers cannot be in a sum over examples: they are not clipped, so each example would add all of its own "
            f"to the sum: {_integers(flat, integers)} If they are counters, leave them out of the tree."
        )
    chosen = flat.leaving(_where(flat, _is_left))
    sums = {place: np.zeros(x.shape[1:], x.dtype) for place, x in chosen.others.items()}
    return replace(chosen, others=sums) if sums else chosen


def without_integers(tree: Tree) -> Tree:
    """Return the tree. Raises a TypeError that names its integers."""
    flat = flatten(tree)
    if _where(flat, _holds_integers):
        raise TypeError(f"integers cannot be clipped here: {_integers(flat, _where(flat, _holds_integers))}")
    return tree


def as_floats(tree: Tree) -> Tree:
    """Return the tree with integers and booleans as the framework's default float, at least float32."""
    flat = flatten(tree)
    integers = _where(flat, _holds_integers) - flat.sparse.keys()  # sparse arrays keep their dtype
    return flat.rebuild(_as_float(x) if i in integers else x for i, x in enumerate(flat.leaves)) if integers else tree


def prepared(backend: Backend, flat: FlatTree) -> list[Any]:
    """Return the leaves as arrays of the backend. Raises a TypeError that names a leaf that cannot be clipped."""
    try:
        return [backend.prepare(leaf) for leaf in flat.leaves]
    except TypeError:
        raise_named(backend.prepare, flat.leaves, partial(names_of, flat))
        raise


def taken(backend: HostBackend, leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> Arrays:
    """Return the leaves as arrays whose values are known. Raises likewise."""
    try:
        return backend.take(leaves)
    except TypeError:
        raise_named(backend.prepare, leaves, names)
        raise


def names_of(flat: FlatTree) -> list[str]:
    """Return the name of each leaf, for errors."""
    return [path or "the gradient" for path in flat.paths()]


def is_integer(leaf: object) -> bool:
    """Say whether a leaf is an integer or boolean, or an array of these."""
    return _holds_integers(_kind(leaf)) and known(leaf)


def left_in(leaves: Sequence[Any]) -> dict[int, str]:
    """Return the places of leaves that do not count, and for integers what they are, for errors, else nothing."""
    kinds = list(map(_kind, leaves))
    places = (place for place, x in enumerate(leaves) if _is_left(kinds[place]) and (isinstance(x, bool) or known(x)))
    return {place: _what(leaves[place]) if _holds_integers(kinds[place]) else "" for place in places}


def first_sparse(flat: FlatTree) -> Sparse | None:
    """Return the first leaf of a tree that is a sparse array; None if all are dense."""
    for place, array in flat.sparse.items():
        return flat.trees.described(place, array)
    for entry in entries_of(flat.leaves):
        found = load(entry).first_sparse(flat.leaves)
        if found is not None:
            return found
    return None


def layers_of(flat: FlatTree) -> tuple[FlatTree, Groups]:
    """Return all leaves of the tree, and for each a group with its index, empty for a leaf that does not count."""
    if not flat.others:
        return flat, Groups.each_alone(len(flat.leaves))
    every, groups = flat.each_alone()
    return every, Groups(groups)


def split_by(flat: FlatTree, prefix: object, what: str = "the thresholds") -> tuple[FlatTree, Groups]:
    """Return the leaves of the prefix, and for each a group with the indices of the leaves below it."""
    every, groups = flat.split_by(prefix, what)
    alone = every.structure == flat.structure and not flat.others
    return every, Groups.each_alone(len(groups)) if alone else Groups(groups)


def _where(flat: FlatTree, chosen: Callable[[Hashable], bool]) -> set[int]:
    """Return the places of the leaves whose kind is chosen. Each kind is asked about once: there are few."""
    given = flat.given()
    kinds = {kind for kind in _kinds(given) if chosen(kind)}
    if not kinds:
        return set()
    own = (isinstance(x, bool) or known(x) for x in flat.leaves)
    return {place for place, (x, ours) in enumerate(zip(given, own, strict=True)) if _kind(x) in kinds and ours}


def _kinds(given: Sequence[Any]) -> set[Hashable]:
    """Return the kinds of all leaves."""
    try:
        return {leaf.dtype for leaf in given}  # nearly always; asking each leaf for its kind takes three times as long
    except AttributeError:
        return set(map(_kind, given))


def _kind(leaf: object) -> Any:
    """Return the dtype of an array, or the type of anything else."""
    return getattr(leaf, "dtype", type(leaf))


def _holds_integers(kind: Hashable) -> bool:
    return issubclass(kind, int) if isinstance(kind, type) else is_integer_name(bare_name(kind))


def _is_left(kind: Hashable) -> bool:
    return _holds_integers(kind) or (not isinstance(kind, type) and is_empty_name(bare_name(kind)))


def _as_float(leaf: object) -> Any:
    framework = framework_of(leaf)
    return float(leaf) if isinstance(leaf, int) else framework and framework.as_float(leaf)


def _what(leaf: object) -> str:
    return f"has dtype {dtype_name(leaf)}" if hasattr(leaf, "dtype") else f"is {leaf!r}"


def _integers(flat: FlatTree, places: Collection[int]) -> str:
    """Return the names of integers at these places of a tree, and what to do with them."""
    named = [f"{path or 'the gradient'} {_what(x)}" for path, x in zip(flat.paths(), flat.given(), strict=True)]
    found = listed([named[place] for place in sorted(places)])
    return f"{found}. If these are gradients, convert them to floating point, for example to float32."
