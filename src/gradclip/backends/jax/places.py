"""Where JAX arrays lie, and what sort they are: results get it from the arrays that they stand for.

An array is committed to its devices, or JAX may move it; its type may be weak; it may be float64 though 64-bit mode
is off. JAX keeps all that where it computes, and loses it on the way through NumPy.
"""

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.extend.core.primitives import convert_element_type_p


def put(data: Sequence[np.ndarray], likes: Sequence[Any]) -> list[jax.Array]:
    """Return JAX arrays of the data, each on the device of its entry in `likes`, and committed if that is."""
    groups: dict[Hashable, list[int]] = {}
    for index, like in enumerate(likes):
        groups.setdefault(_place(like), []).append(index)
    if len(groups) == 1:
        return _put(data, likes[0])
    results = list(data)
    for indices in groups.values():
        made = _put([data[index] for index in indices], likes[indices[0]])
        for index, array in zip(indices, made, strict=True):
            results[index] = array
    return results


def like(array: jax.Array, leaf: object) -> Any:
    """Return a result computed from a leaf that is not traced, as the leaf is: NumPy's, or uncommitted, or weak."""
    if of_numpy(leaf):
        # A copy: NumPy's view of a JAX array cannot be written.
        return np.array(array)[()] if isinstance(leaf, np.generic) else np.array(array)
    if isinstance(leaf, jax.Array) and not leaf.committed and _place(array) != _place(leaf):
        # JAX may move what is not committed, to where other leaves lie, or to its default device.
        (array,) = put([np.array(array.addressable_data(0))], [leaf])
    return typed_like(array, leaf)


def of_numpy(leaf: object) -> bool:
    """Say whether a leaf is an array or scalar of NumPy."""
    return isinstance(leaf, np.ndarray | np.generic)


def typed_like(array: jax.Array, leaf: object) -> jax.Array:
    """Return the array, its type weak where that of the leaf is."""
    weak = type(leaf) in (int, float, complex) or getattr(leaf, "weak_type", False)
    if not weak or array.weak_type:
        return array
    # No function of JAX does this; its primitive does.
    return convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def placed_first(leaves: Sequence[Any]) -> Any:
    """Return the leaf whose device a number for all leaves gets: the first that is committed, or the first array."""
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    return next((x for x in arrays if x.committed), arrays[0] if arrays else None)


def _place(like: object) -> Hashable:
    return (like.sharding, like.committed) if isinstance(like, jax.Array) else None


def _put(data: Sequence[np.ndarray], like: object) -> list[jax.Array]:
    # In one call, which takes half the time of one for each.
    with _mode_for(data):
        if not isinstance(like, jax.Array):
            return jax.device_put(list(data))
        if like.committed:
            return jax.device_put(list(data), like.sharding)
        (device,) = like.devices()
        with jax.default_device(device):
            return jax.device_put(list(data))


def _mode_for(data: Sequence[np.ndarray]) -> AbstractContextManager[Any]:
    """Return the context in which JAX keeps the dtypes of the data."""
    wide = any(x.dtype.char in "dD" for x in data)
    return jax.enable_x64(True) if wide else nullcontext()
