"""JAX pytrees, including registered node types, with sparse arrays as leaves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import tree_util

from gradclip.backends.jax.pieces import elements, pieces
from gradclip.tree import Sparse, Trees

if TYPE_CHECKING:
    from jax.experimental.sparse import JAXSparse


class JaxTrees(Trees):
    """`Trees` for JAX, with JAX's own functions."""

    def knows(self, leaf: object) -> bool:
        return not tree_util.all_leaves([leaf])

    def flatten(self, tree: object) -> tuple[list[Any], Any]:
        # To JAX a sparse array is a node, so its indices would become leaves.
        return tree_util.tree_flatten(tree, is_leaf=recognizer())

    def paths(self, structure: tree_util.PyTreeDef) -> list[str]:
        return [tree_util.keystr(path) for path in _key_paths(structure)]

    def keys(self, structure: tree_util.PyTreeDef) -> list[tuple[Any, ...]]:
        return [tuple(map(_key, path)) for path in _key_paths(structure)]

    def sparse(self, leaves: Sequence[Any]) -> Mapping[int, Any]:
        is_sparse = recognizer()
        return {i: leaf for i, leaf in enumerate(leaves) if is_sparse(leaf)} if is_sparse else {}

    def described(self, place: int, array: JAXSparse) -> Sparse:
        return Sparse(place, type(array).__name__, ".todense()")

    def elements(self, array: JAXSparse) -> Any:
        return elements(array)

    def with_elements(self, array: JAXSparse, before: jax.Array, elements: jax.Array) -> Any:
        children, structure = array.tree_flatten()
        return type(array).tree_unflatten(structure, (pieces(array, before, elements), *children[1:]))


def _key_paths(structure: tree_util.PyTreeDef) -> list[tuple[Any, ...]]:
    # JAX lists the paths of a tree, not of a structure, so put numbers in place of the leaves.
    numbered = structure.unflatten(range(structure.num_leaves))
    return [path for path, _ in tree_util.tree_flatten_with_path(numbered)[0]]


def _key(entry: object) -> Any:
    return next((getattr(entry, name) for name in ("key", "name", "idx") if hasattr(entry, name)), str(entry))


def recognizer() -> Callable[[Any], bool] | None:
    """Return a predicate for sparse arrays, or None if their module is not loaded yet."""
    module = sys.modules.get("jax.experimental.sparse")
    return None if module is None else lambda node: isinstance(node, module.JAXSparse)


JAX_TREES = JaxTrees()
