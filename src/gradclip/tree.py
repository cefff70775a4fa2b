"""Trees: flatten, rebuild, and the paths that error messages name.

Containers are dicts, lists, tuples, namedtuples and whatever is registered with `optree`. A tree that holds
a JAX array, or a node that only JAX knows, goes through `jax.tree_util`, so that classes registered there keep
working. `None` is an empty container: it has no leaves and comes back as it was.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optree

from gradclip import sparse

_MOST_LISTED = 10


@dataclass(frozen=True)
class FlatTree:
    """The leaves of a tree in order, and what rebuilds a tree of the same structure around others."""

    leaves: list[Any]
    structure: Any
    _flatten: Callable[[Any], tuple[list[Any], Any]]
    sparse: Mapping[int, Any] = field(default_factory=dict)  # the leaves that stand for sparse arrays

    def paths(self) -> list[str]:
        """Return the path of each leaf, written as the Python that reaches it: `['layer'][0]`."""
        if self._flatten is _optree_flatten:
            return [accessor.codify("") for accessor in optree.treespec_accessors(self.structure)]
        util = sys.modules["jax"].tree_util
        numbered = self.arrange(range(len(self.leaves)))
        return [util.keystr(path) for path, _ in util.tree_flatten_with_path(numbered)[0]]

    def rebuild(self, leaves: Iterable[Any]) -> Any:
        """Return a tree of this structure that holds `leaves`, arrays like its own; sparse ones are so again."""
        if self.sparse:
            given = enumerate(leaves)
            leaves = [sparse.with_elements(self.sparse[i], x) if i in self.sparse else x for i, x in given]
        return self.arrange(leaves)

    def arrange(self, values: Iterable[Any]) -> Any:
        """Return a tree of this structure with any values in place of its leaves."""
        if self._flatten is _optree_flatten:
            return optree.tree_unflatten(self.structure, values)
        return self.structure.unflatten(values)

    def split_by(self, prefix: Any, what: str = "the thresholds") -> "tuple[FlatTree, list[list[int]]]":
        """Return the flattened `prefix` and, for each of its leaves, the indices of the leaves below it.

        Raises ValueError that says `what` it is where `prefix` is not a prefix of this tree.
        """
        leaves, structure = self._flatten(prefix)
        numbered = self.arrange(range(len(self.leaves)))
        try:
            subtrees = structure.flatten_up_to(numbered)
        except ValueError as mismatch:
            given = FlatTree(leaves, structure, self._flatten)
            groups, alone = _matched_by_keys(_keys(structure, self._flatten), _keys(self.structure, self._flatten))
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
        groups = [self._flatten(subtree)[0] for subtree in subtrees]
        return FlatTree(leaves, structure, self._flatten), groups


def _keys(structure: Any, flattened_by: Any) -> list[tuple[Any, ...]]:
    """Return what leads to each leaf: keys, indices and names of attributes."""
    if flattened_by is _optree_flatten:
        return list(optree.treespec_paths(structure))
    util = sys.modules["jax"].tree_util
    numbered = structure.unflatten(range(structure.num_leaves))
    return [tuple(map(_key, path)) for path, _ in util.tree_flatten_with_path(numbered)[0]]


def _key(entry: Any) -> Any:
    return next((getattr(entry, name) for name in ("key", "name", "idx") if hasattr(entry, name)), str(entry))


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


def listed(items: Sequence[Any], separator: str = ", ") -> str:
    """Return what an error says of many things: the first ten, and how many more there are."""
    more = len(items) - _MOST_LISTED
    return separator.join([*map(str, items[:_MOST_LISTED]), *([f"and {more} more"] if more > 0 else [])])


def flatten(tree: Any) -> FlatTree:
    """Flatten `tree` with the registry that knows its nodes."""
    leaves, structure = _optree_flatten(tree)
    if "jax" in sys.modules and any(map(_belongs_to_jax, leaves)):
        leaves, structure = _jax_flatten(tree)
        is_sparse = sparse.recognizer()
        found = {i: leaf for i, leaf in enumerate(leaves) if is_sparse(leaf)} if is_sparse else {}
        leaves = [sparse.elements(leaf) if i in found else leaf for i, leaf in enumerate(leaves)] if found else leaves
        return FlatTree(leaves, structure, _jax_flatten, found)
    return FlatTree(leaves, structure, _optree_flatten)


def _optree_flatten(tree: Any) -> tuple[list[Any], Any]:
    leaves, structure = optree.tree_flatten(tree)
    return leaves, structure


def _jax_flatten(tree: Any) -> tuple[list[Any], Any]:
    return sys.modules["jax"].tree_util.tree_flatten(tree, is_leaf=sparse.recognizer())


def _belongs_to_jax(leaf: Any) -> bool:
    """Say whether a leaf is JAX's, or none that is known: what only JAX can take apart.

    JAX's own types are not asked: `torch.compile` cannot trace that.
    """
    torch = sys.modules.get("torch")
    known = (np.ndarray, np.generic, int, float, complex)
    if isinstance(leaf, known) or (torch is not None and isinstance(leaf, torch.Tensor)):
        return False
    return not isinstance(leaf, Iterator)
