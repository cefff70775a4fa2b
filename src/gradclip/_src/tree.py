"""Trees: flatten and rebuild them, and find the paths that error messages name.

Containers are dicts, lists, tuples, namedtuples and all classes registered with `optree`. A tree that contains a JAX
array, or a node that only JAX knows, goes through `jax.tree_util`, so classes registered there work too. `tf.nest`
handles TensorFlow's containers. `None` is an empty container: it has no leaves and stays None.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import optree

from gradclip._src.words import listed

T = TypeVar("T")


class Sparse(NamedTuple):
    """A sparse array among the leaves: its index, its kind for errors, and the method that makes it dense."""

    place: int
    kind: str
    method: str


class Trees:
    """Tree functions: those of `optree`, for dense leaves. A framework overrides what it does in a way of its own.

    A structure is a tree without its leaves. It is optree's or JAX's, so it has `unflatten` and `flatten_up_to`.
    """

    def knows(self, leaf: object) -> bool:
        """Say whether a value that is not an array of any framework is this framework's tree node or sparse array."""
        return False

    def flatten(self, tree: object) -> tuple[list[Any], Any]:
        """Return the leaves in order, and the structure."""
        return optree.tree_flatten(tree)

    def paths(self, flat: "FlatTree") -> list[str]:
        """Return the path of each leaf of a tree, as the Python expression that accesses it."""
        return [accessor.codify("") for accessor in optree.treespec_accessors(flat.structure)]

    def keys(self, flat: "FlatTree") -> list[tuple[Any, ...]]:
        """Return the keys, indices and attribute names that lead to each leaf of a tree."""
        return list(optree.treespec_paths(flat.structure))

    def sparse(self, leaves: Sequence[Any]) -> Mapping[int, Any]:
        """Return the sparse leaves by index."""
        return {}

    def described(self, place: int, array: Any) -> Sparse:
        """Describe a sparse array for an error."""
        raise NotImplementedError

    def elements(self, array: Any) -> Any:
        """Return the elements of a sparse array as an array. Sums of pieces in half precision become float32."""
        raise NotImplementedError

    def with_elements(self, array: Any, before: Any, elements: Any) -> Any:
        """Return a sparse array like this one, with other elements; the same if they are those of `before`.

        `before` is what the method `elements` returned. Elements are rounded toward zero to the array's dtype.
        """
        raise NotImplementedError


_OPTREE = Trees()
_UNKNOWN = object()


def _no_trees(leaves: Sequence[Any]) -> Trees | None:
    return None


_trees_of: Callable[[Sequence[Any]], Trees | None] = _no_trees


def find_trees_with(finder: Callable[[Sequence[Any]], Trees | None]) -> None:
    """Set the function that finds a framework's tree functions for leaves, or None. The registry of frameworks does."""
    global _trees_of
    _trees_of = finder


@dataclass(frozen=True)
class FlatTree:
    """The leaves of a tree in order, and the structure to rebuild a tree around other leaves.

    `others` are leaves that come back as they are, by their place among all leaves of the tree; `leaves` are the rest.
    """

    leaves: list[Any]
    structure: Any
    trees: Trees
    sparse: Mapping[int, Any] = field(default_factory=dict)  # sparse arrays, by the index of their leaf
    others: Mapping[int, Any] = field(default_factory=dict)

    def leaving(self, places: Set[int]) -> "FlatTree":
        """Return the tree with the leaves at these places left as they are."""
        if not places:
            return self
        kept = [place for place in range(len(self.leaves)) if place not in places]
        sparse = {index: self.sparse[place] for index, place in enumerate(kept) if place in self.sparse}
        others = {place: self.sparse.get(place, self.leaves[place]) for place in sorted(places)}
        return replace(self, leaves=[self.leaves[place] for place in kept], sparse=sparse, others=others)

    def outline(self, stand_ins: Iterable[Any]) -> "FlatTree":
        """Return the tree with stand-ins for its leaves, and without its other arrays, so that it can be kept."""
        return replace(self, leaves=list(stand_ins), sparse={}, others=dict.fromkeys(self.others))

    def paths(self) -> list[str]:
        """Return the path of each leaf, written as the Python that reaches it: `['layer'][0]`."""
        return self.of_leaves(self.trees.paths(self))

    def given(self) -> list[Any]:
        """Return `leaves` as they were passed in: the elements of a sparse array may have another dtype."""
        return [self.sparse.get(i, x) for i, x in enumerate(self.leaves)] if self.sparse else self.leaves

    def every_given(self) -> list[Any]:
        """Return all leaves of the tree as they were passed in, `others` included; what an outline lacks is a leaf."""
        return [_UNKNOWN if leaf is None else leaf for leaf in self._with(self.others, self.given())]

    def of_leaves(self, of_all: list[T]) -> list[T]:
        """Return what belongs to `leaves`, given one value for each leaf of the tree, `others` included."""
        return [one for place, one in enumerate(of_all) if place not in self.others] if self.others else of_all

    def each_alone(self) -> "tuple[FlatTree, list[list[int]]]":
        """Return all leaves of the tree, and for each its index in `leaves` in a list, which is empty for `others`."""
        alone = [[index] for index in range(len(self.leaves))]
        if not self.others:
            return self, alone
        nothing: dict[int, list[int]] = {place: [] for place in self.others}
        whole = replace(self, leaves=self._with(self.others, self.leaves), sparse={}, others={})
        return whole, self._with(nothing, alone)

    def rebuild(self, leaves: Iterable[Any]) -> Any:
        """Return a tree of this structure from new leaves, arrays like its own. Sparse leaves become sparse again."""
        if self.sparse:
            remade, given = self.trees.with_elements, enumerate(leaves)
            leaves = [remade(self.sparse[i], self.leaves[i], x) if i in self.sparse else x for i, x in given]
        return self.structure.unflatten(self._with(self.others, leaves) if self.others else leaves)

    def arrange(self, values: Iterable[Any], other: object = None) -> Any:
        """Return a tree of this structure with any values in place of its leaves, and `other` in place of others."""
        every = self._with(dict.fromkeys(self.others, other), values) if self.others else values
        return self.structure.unflatten(every)

    def _with(self, others: Mapping[int, T], values: Iterable[T]) -> list[T]:
        """Return values for all leaves of the tree, from those for `others` and those for `leaves`."""
        every = list(values)
        for place, other in others.items():
            every.insert(place, other)
        return every

    def split_by(self, prefix: object, what: str = "the thresholds") -> "tuple[FlatTree, list[list[int]]]":
        """Return the flattened `prefix` and, for each of its leaves, the indices of this tree's leaves below it.

        Raises ValueError if `prefix` is not a prefix of this tree; the error calls it `what`.
        """
        leaves, structure = self.trees.flatten(prefix)
        if structure == self.structure and not self.others:
            return FlatTree(leaves, structure, self.trees), [[index] for index in range(len(leaves))]
        every = self.every_given()
        index_of = {place: index for index, place in enumerate(self.of_leaves(list(range(len(every)))))}
        try:
            subtrees = structure.flatten_up_to(self.structure.unflatten(every))
        except ValueError as mismatch:
            given = FlatTree(leaves, structure, self.trees)
            groups, alone = _matched_by_keys(self.trees.keys(given), self.trees.keys(self))
            idle = [path for path, group in zip(given.paths(), groups, strict=True) if not group]
            alone = [place for place in alone if place in index_of]
            if not idle and not alone:
                return given, _renumbered(groups, index_of)
            paths = self.trees.paths(self)
            lacking = f"nothing is given for {listed([paths[i] or 'the array' for i in alone])}" if alone else ""
            beyond = f"there is no gradient at {listed([path or 'the root' for path in idle])}" if idle else ""
            raise ValueError(
                f"{what} must be one number or a prefix of the tree of gradients (the same containers, cut off at any "
                f"depth): {', and '.join(filter(None, (lacking, beyond)))}."
            ) from mismatch
        places = iter(range(len(every)))
        groups = [[next(places) for _ in self.trees.flatten(subtree)[0]] for subtree in subtrees]
        return FlatTree(leaves, structure, self.trees), _renumbered(groups, index_of)


# Cached, so all steps of a monitor share one tuple of layer names.
@lru_cache(maxsize=64)
def dotted(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Shorten `['layer'][0]` to layer.0, as patterns and pictures name it, and number the names that become equal."""
    shorter = [re.sub(r"\[(?:'([^']*)'|(\d+))\]", r".\1\2", path).strip(".") or "all" for path in paths]
    found: dict[str, None] = {}
    for name in shorter:
        unique, number = name, 1
        while unique in found:
            number += 1
            unique = f"{name} ({number})"
        found[unique] = None
    return tuple(found)


def _renumbered(groups: Sequence[Sequence[int]], index_of: Mapping[int, int]) -> list[list[int]]:
    return [[index_of[place] for place in group if place in index_of] for group in groups]


def _matched_by_keys(
    prefixes: Sequence[tuple[Any, ...]], paths: Sequence[tuple[Any, ...]]
) -> tuple[list[list[int]], list[int]]:
    """Return the indices of the paths that begin with each prefix, and of the paths without a prefix.

    This lets plain dicts be prefixes of other containers with the same keys, such as Flax's State.
    """
    groups: dict[tuple[Any, ...], list[int]] = {prefix: [] for prefix in prefixes}
    alone: list[int] = []
    for i, path in enumerate(paths):
        found = next((path[:n] for n in range(len(path) + 1) if path[:n] in groups), None)
        (alone if found is None else groups[found]).append(i)
    return list(groups.values()), alone


def flattened(leaves: list[Any], structure: Any) -> FlatTree:
    """Return what `optree` has flattened, if it knows all nodes."""
    return FlatTree(leaves, structure, _OPTREE)


def flatten(tree: object) -> FlatTree:
    """Flatten `tree` with the library that knows its nodes."""
    leaves, structure = optree.tree_flatten(tree)
    trees = _trees_of(leaves)
    if trees is None:
        return FlatTree(leaves, structure, _OPTREE)
    leaves, structure = trees.flatten(tree)
    sparse = trees.sparse(leaves)
    if sparse:
        leaves = [trees.elements(leaf) if i in sparse else leaf for i, leaf in enumerate(leaves)]
    return FlatTree(leaves, structure, trees, sparse)
