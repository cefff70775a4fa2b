"""JAX pytrees, including registered node types, with sparse arrays as leaves.

A sparse array is clipped as one dense array of its elements. An element may be stored in several pieces, which count as
their sum. Pieces outside the shape are ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import tree_util

from gradclip.backends.framework import Sparse

if TYPE_CHECKING:
    from jax.experimental.sparse import JAXSparse


class JaxTrees:
    """`Trees` for JAX, with JAX's own functions."""

    def knows(self, leaf: object) -> bool:
        return not tree_util.all_leaves([leaf])

    def flatten(self, tree: object) -> tuple[list[Any], Any]:
        # To JAX a sparse array is a node, so its indices would become leaves.
        return tree_util.tree_flatten(tree, is_leaf=recognizer())

    def unflatten(self, structure: tree_util.PyTreeDef, leaves: Iterable[Any]) -> Any:
        return structure.unflatten(leaves)

    def paths(self, structure: tree_util.PyTreeDef) -> list[str]:
        return [tree_util.keystr(path) for path in _key_paths(structure)]

    def keys(self, structure: tree_util.PyTreeDef) -> list[tuple[Any, ...]]:
        return [tuple(map(_key, path)) for path in _key_paths(structure)]

    def subtrees(self, structure: Any, tree: object) -> list[Any]:
        return structure.flatten_up_to(tree)

    def sparse(self, leaves: Sequence[Any]) -> Mapping[int, Any]:
        is_sparse = recognizer()
        return {i: leaf for i, leaf in enumerate(leaves) if is_sparse(leaf)} if is_sparse else {}

    def described(self, place: int, array: JAXSparse) -> Sparse:
        return Sparse(place, type(array).__name__, ".todense()")

    def elements(self, array: JAXSparse) -> Any:
        return elements(array)

    def with_elements(self, array: JAXSparse, elements: jax.Array) -> Any:
        children, structure = array.tree_flatten()
        return type(array).tree_unflatten(structure, (elements, *children[1:]))


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


def elements(array: JAXSparse) -> Any:
    """Return an array with the shape of `array.data`: each element at its first piece, zeros at its other pieces.

    Raises TypeError for formats other than BCOO and BCSR.
    """
    module = sys.modules["jax.experimental.sparse"]
    if not isinstance(array, module.BCOO | module.BCSR):
        raise TypeError(
            f"sparse gradients must be BCOO or BCSR, got {type(array).__name__}. Convert them to "
            "jax.experimental.sparse.BCOO, or to dense arrays with .todense()."
        )
    indices = array.indices if isinstance(array, module.BCOO) else array.to_bcoo().indices
    batch = array.shape[: array.n_batch]
    bounds = array.shape[array.n_batch : array.ndim - array.n_dense]
    with jax.enable_x64(True):  # keeps float64 also when 64-bit mode is off
        data = jnp.broadcast_to(array.data, batch + array.data.shape[array.n_batch :])
        indices = jnp.broadcast_to(indices, batch + indices.shape[array.n_batch :])

        def merge(data: jax.Array, indices: jax.Array) -> Any:
            return _merged(data, indices, bounds, array.unique_indices)

        for _ in range(array.n_batch):
            merge = jax.vmap(merge)
        return merge(data, indices)


def _merged(data: jax.Array, indices: jax.Array, bounds: tuple[int, ...], unique: bool) -> Any:
    count = data.shape[0]
    if not count:
        return data

    def each(flags: jax.Array) -> Any:
        return flags.reshape(count, *[1] * (data.ndim - 1))

    inside = (indices < jnp.asarray(bounds, indices.dtype)).all(axis=-1)
    data = jnp.where(each(inside), data, jnp.zeros_like(data))
    if unique:
        return data
    first = jnp.zeros(count, int)
    if bounds:
        # While JAX traces, the number of distinct indices is unknown, so make room for all.
        _, places, which = jnp.unique(indices, axis=0, size=count, return_index=True, return_inverse=True)
        first = places[which]
    # Do not add zero to an element with one piece: that would turn -0.0 into 0.0 and flush subnormals.
    alone = jnp.zeros(count, int).at[first].add(1)[first] == 1
    return jnp.where(each(alone), data, jnp.zeros_like(data).at[first].add(data))


JAX_TREES = JaxTrees()
