"""Trees: flatten, rebuild, and the paths that error messages name.

Containers are dicts, lists, tuples, namedtuples and whatever is registered with `optree`. A tree that holds
a JAX array, or a node that only JAX knows, goes through `jax.tree_util`, so that classes registered there keep
working. Containers of TensorFlow are taken apart by `tf.nest`. `None` is an empty container: it has no leaves and
comes back as it was.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree

from gradclip.backends.framework import Sparse, Trees
from gradclip.backends.registry import entries_of, load, trees_of
from gradclip.wording import listed


class _Optree:
    """The functions of `Trees`, by `optree`, whose leaves are dense."""

    def knows(self, leaf: object) -> bool:
        return False

    def flatten(self, tree: object) -> tuple[list[Any], Any]:
        leaves, structure = optree.tree_flatten(tree)
        return leaves, structure

    def unflatten(self, structure: Any, leaves: Iterable[Any]) -> Any:
        return optree.tree_unflatten(structure, leaves)

    def paths(self, structure: Any) -> list[str]:
        return [accessor.codify("") for accessor in optree.treespec_accessors(structure)]

    def keys(self, structure: Any) -> list[tuple[Any, ...]]:
        return list(optree.treespec_paths(structure))

    def subtrees(self, structure: Any, tree: object) -> list[Any]:
        return structure.flatten_up_to(tree)

    def sparse(self, leaves: Sequence[Any]) -> Mapping[int, Any]:
        return {}

    def described(self, place: int, array: object) -> Sparse:
        raise NotImplementedError

    def elements(self, array: object) -> Any:
        raise NotImplementedError

    def with_elements(self, array: object, elements: object) -> Any:
        raise NotImplementedError


_OPTREE = _Optree()


@dataclass(frozen=True)
class FlatTree:
    """The leaves of a tree in order, and what rebuilds a tree of the same structure around others."""

    leaves: list[Any]
    structure: Any
    trees: Trees
    sparse: Mapping[int, Any] = field(default_factory=dict)  # the leaves that stand for sparse arrays

    def paths(self) -> list[str]:
        """Return the path of each leaf, written as the Python that reaches it: `['layer'][0]`."""
        return self.trees.paths(self.structure)

    def rebuild(self, leaves: Iterable[Any]) -> Any:
        """Return a tree of this structure that holds `leaves`, arrays like its own; sparse ones are so again."""
        if self.sparse:
            remade, given = self.trees.with_elements, enumerate(leaves)
            leaves = [remade(self.sparse[i], x) if i in self.sparse else x for i, x in given]
        return self.trees.unflatten(self.structure, leaves)

    def arrange(self, values: Iterable[Any]) -> Any:
        """Return a tree of this structure with any values in place of its leaves."""
        return self.trees.unflatten(self.structure, values)

    def split_by(self, prefix: object, what: str = "the thresholds") -> "tuple[FlatTree, list[list[int]]]":
        """Return the flattened `prefix` and, for each of its leaves, the indices of the leaves below it.

        Raises ValueError that says `what` it is where `prefix` is not a prefix of this tree.
        """
        leaves, structure = self.trees.flatten(prefix)
        numbered = self.arrange(range(len(self.leaves)))
        try:
            subtrees = self.trees.subtrees(structure, numbered)
        except ValueError as mismatch:
            given = FlatTree(leaves, structure, self.trees)
            groups, alone = _matched_by_keys(self.trees.keys(structure), self.trees.keys(self.structure))
            idle = [path for path, group in zip(given.paths(), groups, strict=True) if not group]
            if not idle and not alone:
                return given, groups
            paths = self.paths()
            lacking = f"there is none for {listed([paths[i] or 'the array' for i in alone])}" if alone else ""
            beyond = f"no gradient lies at {listed([path or 'the root' for path in idle])}" if idle else ""
            raise ValueError(
                f"{what} must be one number or a prefix of the tree of gradients (the same containers, cut off at any "
                f"depth): {', and '.join(filter(None, (lacking, beyond)))}."
            ) from mismatch
        groups = [self.trees.flatten(subtree)[0] for subtree in subtrees]
        return FlatTree(leaves, structure, self.trees), groups


def _matched_by_keys(
    prefixes: Sequence[tuple[Any, ...]], paths: Sequence[tuple[Any, ...]]
) -> tuple[list[list[int]], list[int]]:
    """Return the indices of the paths that begin with each prefix, and of those that begin with none.

    So plain dicts are prefixes of other containers with the same keys, such as a State of Flax.
    """
    groups: dict[tuple[Any, ...], list[int]] = {prefix: [] for prefix in prefixes}
    alone: list[int] = []
    for i, path in enumerate(paths):
        found = next((path[:n] for n in range(len(path) + 1) if path[:n] in groups), None)
        (alone if found is None else groups[found]).append(i)
    return list(groups.values()), alone


def first_sparse(flat: FlatTree) -> Sparse | None:
    """Return the first leaf of a tree that is a sparse array; None where all are dense."""
    for place, array in flat.sparse.items():
        return flat.trees.described(place, array)
    for entry in entries_of(flat.leaves):
        found = load(entry).first_sparse(flat.leaves)
        if found is not None:
            return found
    return None


def flatten(tree: object) -> FlatTree:
    """Flatten `tree` with the functions that know its nodes."""
    leaves, structure = optree.tree_flatten(tree)
    trees = trees_of(leaves)
    if trees is None:
        return FlatTree(leaves, structure, _OPTREE)
    leaves, structure = trees.flatten(tree)
    sparse = trees.sparse(leaves)
    if sparse:
        leaves = [trees.elements(leaf) if i in sparse else leaf for i, leaf in enumerate(leaves)]
    return FlatTree(leaves, structure, trees, sparse)
