"""Trees: flatten, rebuild, and the paths that error messages name.

Containers are dicts, lists, tuples, namedtuples and whatever is registered with `optree`. A tree that holds
a JAX array, or a node that only JAX knows, goes through `jax.tree_util`, so that classes registered there keep
working. `None` is an empty container: it has no leaves and comes back as it was.
"""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree

_MOST_LISTED = 10


@dataclass(frozen=True)
class FlatTree:
    """The leaves of a tree in order, and what rebuilds a tree of the same structure around others."""

    leaves: list[Any]
    structure: Any
    _flatten: Callable[[Any], tuple[list[Any], Any]]

    def paths(self) -> list[str]:
        """Return the path of each leaf, written as the Python that reaches it: `['layer'][0]`."""
        if self._flatten is _optree_flatten:
            return [accessor.codify("") for accessor in optree.treespec_accessors(self.structure)]
        util = sys.modules["jax"].tree_util
        numbered = self.rebuild(range(len(self.leaves)))
        return [util.keystr(path) for path, _ in util.tree_flatten_with_path(numbered)[0]]

    def rebuild(self, leaves: Iterable[Any]) -> Any:
        """Return a tree of this structure that holds `leaves`."""
        if self._flatten is _optree_flatten:
            return optree.tree_unflatten(self.structure, leaves)
        return self.structure.unflatten(leaves)

    def split_by(self, prefix: Any) -> "tuple[FlatTree, list[list[int]]]":
        """Return the flattened `prefix` and, for each of its leaves, the indices of the leaves below it.

        Raises ValueError where `prefix` is not a prefix of this tree.
        """
        leaves, structure = self._flatten(prefix)
        numbered = self.rebuild(range(len(self.leaves)))
        try:
            subtrees = structure.flatten_up_to(numbered)
        except ValueError as mismatch:
            groups = _matched_by_keys(_keys(structure, self._flatten), _keys(self.structure, self._flatten))
            if groups:
                return FlatTree(leaves, structure, self._flatten), groups
            raise ValueError(
                "the thresholds must be one number or a prefix of the tree of gradients "
                f"(the same containers, cut off at any depth): {_shortened(str(mismatch))}"
            ) from None
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
    return next(getattr(entry, name) for name in ("key", "name", "idx") if hasattr(entry, name))


def _matched_by_keys(prefixes: Sequence[tuple[Any, ...]], paths: Sequence[tuple[Any, ...]]) -> list[list[int]]:
    """Return the indices of the paths that begin with each prefix; nothing unless each has one, and one alone.

    So plain dicts are prefixes of other containers with the same keys, such as a State of Flax.
    """
    groups = [[i for i, path in enumerate(paths) if path[: len(prefix)] == prefix] for prefix in prefixes]
    once = sorted(i for group in groups for i in group) == list(range(len(paths)))
    return groups if once and all(groups) and all(prefixes) else []


def listed(items: Sequence[str], separator: str = ", ") -> str:
    """Return what an error says of many things: the first ten, and how many more there are."""
    more = len(items) - _MOST_LISTED
    return separator.join([*items[:_MOST_LISTED], *([f"and {more} more"] if more > 0 else [])])


def _shortened(message: str) -> str:
    """Return a message in which lists are not longer than that."""
    return re.sub(r"(?<=[\[{])[^][{}]*(?=[\]}])", lambda found: listed(found[0].split(", ")), message)


def flatten(tree: Any) -> FlatTree:
    """Flatten `tree` with the registry that knows its nodes."""
    leaves, structure = _optree_flatten(tree)
    if "jax" in sys.modules and any(map(_belongs_to_jax, leaves)):
        return FlatTree(*_jax_flatten(tree), _jax_flatten)
    return FlatTree(leaves, structure, _optree_flatten)


def _optree_flatten(tree: Any) -> tuple[list[Any], Any]:
    leaves, structure = optree.tree_flatten(tree)
    return leaves, structure


def _jax_flatten(tree: Any) -> tuple[list[Any], Any]:
    return sys.modules["jax"].tree_util.tree_flatten(tree)


def _belongs_to_jax(leaf: Any) -> bool:
    """Say whether a leaf is JAX's, or none that is known: what only JAX can take apart.

    JAX's own types are not asked: `torch.compile` cannot trace that.
    """
    torch = sys.modules.get("torch")
    known = (np.ndarray, np.generic, int, float, complex)
    return not (isinstance(leaf, known) or (torch is not None and isinstance(leaf, torch.Tensor)))
