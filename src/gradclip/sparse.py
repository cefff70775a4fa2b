"""Sparse arrays of JAX as leaves: their elements in one array, and sparse arrays of the same indices around others.

An element may be written in several pieces, which count as their sum, and pieces outside of the shape as nothing.
"""

import sys
from collections.abc import Callable
from typing import Any


def recognizer() -> Callable[[Any], bool] | None:
    """Return what tells sparse arrays from everything else; None where there can be none yet."""
    module = sys.modules.get("jax.experimental.sparse")
    return None if module is None else lambda node: isinstance(node, module.JAXSparse)


def elements(array: Any) -> Any:
    """Return an array shaped as `array.data`, each element where its first piece is, and zeros for its other pieces.

    Raises TypeError for formats other than BCOO and BCSR.
    """
    jax, module = sys.modules["jax"], sys.modules["jax.experimental.sparse"]
    if not isinstance(array, module.BCOO | module.BCSR):
        raise TypeError(
            f"sparse gradients must be BCOO or BCSR, got {type(array).__name__}. Convert them to "
            "jax.experimental.sparse.BCOO, or to dense ones by .todense()."
        )
    indices = array.indices if isinstance(array, module.BCOO) else array.to_bcoo().indices
    batch = array.shape[: array.n_batch]
    bounds = array.shape[array.n_batch : array.ndim - array.n_dense]
    with jax.enable_x64(True):  # keeps float64 where the mode is off
        data = jax.numpy.broadcast_to(array.data, batch + array.data.shape[array.n_batch :])
        indices = jax.numpy.broadcast_to(indices, batch + indices.shape[array.n_batch :])

        def merge(data: Any, indices: Any) -> Any:
            return _merged(jax.numpy, data, indices, bounds, array.unique_indices)

        for _ in range(array.n_batch):
            merge = jax.vmap(merge)
        return merge(data, indices)


def with_elements(array: Any, data: Any) -> Any:
    """Return a sparse array as this one, with other data."""
    children, structure = array.tree_flatten()
    return type(array).tree_unflatten(structure, (data, *children[1:]))


def _merged(jnp: Any, data: Any, indices: Any, bounds: tuple[int, ...], unique: bool) -> Any:
    count = data.shape[0]
    if not count:
        return data

    def each(flags: Any) -> Any:
        return flags.reshape(count, *[1] * (data.ndim - 1))

    inside = (indices < jnp.asarray(bounds, indices.dtype)).all(axis=-1)
    data = jnp.where(each(inside), data, jnp.zeros_like(data))
    if unique:
        return data
    first = jnp.zeros(count, int)
    if bounds:
        _, places, which = jnp.unique(indices, axis=0, size=count, return_index=True, return_inverse=True)
        first = places[which]
    alone = jnp.zeros(count, int).at[first].add(1)[first] == 1
    return jnp.where(each(alone), data, jnp.zeros_like(data).at[first].add(data))
