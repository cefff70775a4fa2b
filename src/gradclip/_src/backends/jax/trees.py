"""JAX pytrees, including registered node types, with sparse arrays as leaves.

A sparse array is clipped as one dense array of its elements, and is sparse afterwards. An element may be stored in
several pieces, which count as their sum. Pieces outside the shape are ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax, tree_util

from gradclip._src.tree import FlatTree, Sparse, Trees

if TYPE_CHECKING:
    from jax.experimental.sparse import JAXSparse


class JaxTrees(Trees):
    """`Trees` for JAX, with JAX's own functions."""

    def knows(self, leaf: object) -> bool:
        return not tree_util.all_leaves([leaf])

    def flatten(self, tree: object) -> tuple[list[Any], Any]:
        # To JAX a sparse array is a node, so its indices would become leaves.
        return tree_util.tree_flatten(tree, is_leaf=recognizer())

    def paths(self, flat: FlatTree) -> list[str]:
        return [tree_util.keystr(path) for path in _key_paths(flat)]

    def keys(self, flat: FlatTree) -> list[tuple[Any, ...]]:
        return [tuple(map(_key, path)) for path in _key_paths(flat)]

    def sparse(self, leaves: Sequence[Any]) -> Mapping[int, Any]:
        is_sparse = recognizer()
        return {i: leaf for i, leaf in enumerate(leaves) if is_sparse(leaf)} if is_sparse else {}

    def described(self, place: int, array: JAXSparse) -> Sparse:
        return Sparse(place, type(array).__name__, ".todense()")

    def elements(self, array: JAXSparse) -> Any:
        """Return an array with the shape of `array.data`: each element at its first piece, zeros at its other pieces.

        Sums are rounded once, from float64. Half types become float32, where the sum of their pieces fits. Raises
        TypeError for formats other than BCOO and BCSR.
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
        with _mixed():
            data = jnp.broadcast_to(array.data, batch + array.data.shape[array.n_batch :])
            indices = jnp.broadcast_to(indices, batch + indices.shape[array.n_batch :])

            def merge(data: jax.Array, indices: jax.Array) -> Any:
                return _merged(data, indices, bounds, array.unique_indices)

            for _ in range(array.n_batch):
                merge = jax.vmap(merge)
            return merge(data, indices)

    def with_elements(self, array: JAXSparse, before: jax.Array, elements: jax.Array) -> Any:
        children, structure = array.tree_flatten()
        return type(array).tree_unflatten(structure, (pieces(array, before, elements), *children[1:]))


def _key_paths(flat: FlatTree) -> list[tuple[Any, ...]]:
    # JAX lists the paths of a tree, not of a structure. A node may look at what it is built from, such as shapes.
    leaves = flat.every_given()
    ours = set(map(id, leaves))
    paths, _ = tree_util.tree_flatten_with_path(flat.structure.unflatten(leaves), is_leaf=lambda node: id(node) in ours)
    return [path for path, _ in paths]


def _key(entry: object) -> Any:
    return next((getattr(entry, name) for name in ("key", "name", "idx") if hasattr(entry, name)), str(entry))


def recognizer() -> Callable[[Any], bool] | None:
    """Return a predicate for sparse arrays, or None if their module is not loaded yet."""
    module = sys.modules.get("jax.experimental.sparse")
    return None if module is None else lambda node: isinstance(node, module.JAXSparse)


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
    given = data.astype(jnp.promote_types(data.dtype, jnp.float32))
    wide = data.astype(jnp.promote_types(data.dtype, jnp.float64))
    return jnp.where(each(alone), given, jnp.zeros_like(wide).at[first].add(wide).astype(given.dtype))


def pieces(array: JAXSparse, before: jax.Array, rest: jax.Array) -> Any:
    """Return the pieces of other elements: those of the array if they are those `before`, else the elements."""
    with _mixed():
        data = jnp.broadcast_to(array.data, before.shape)
        return jnp.where(_same(before, rest), data, _toward_zero(jnp.asarray(rest), data.dtype))


@contextmanager
def _mixed() -> Iterator[None]:
    """Keep float64 also when 64-bit mode is off, and let dtypes mix also where the user forbids promotion."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def _same(x: jax.Array, y: jax.Array) -> Any:
    """Say whether all elements are finite and have the same bits. A comparison of numbers may flush some to zero."""
    if jnp.iscomplexobj(x):
        return _same(x.real, y.real) & _same(x.imag, y.imag)
    bits = f"int{8 * x.dtype.itemsize}"
    same = lax.bitcast_convert_type(x, bits) == lax.bitcast_convert_type(y, bits)
    return (jnp.isfinite(x) & same).all()


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _toward_zero(x: jax.Array, dtype: Any) -> Any:
    """Convert to a narrower type or the same. The largest number takes the place of larger ones."""
    if x.dtype == dtype:
        return x
    if dtype == jnp.bfloat16:  # the first half of the bits of float32
        bits = lax.bitcast_convert_type(x, jnp.int32) & -(1 << 16)
        return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)
    nearest = x.astype(dtype)
    bits = lax.bitcast_convert_type(nearest, jnp.int16)
    larger = jnp.abs(nearest.astype(x.dtype)) > jnp.abs(x)
    return lax.bitcast_convert_type(jnp.where(larger, bits - 1, bits), dtype)


@_toward_zero.defjvp
def _(dtype: Any, at: tuple[jax.Array], change: tuple[jax.Array]) -> Any:
    return _toward_zero(at[0], dtype), change[0].astype(dtype)


JAX_TREES = JaxTrees()
