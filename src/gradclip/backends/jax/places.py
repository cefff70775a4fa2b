"""Give results the device, commitment and type of the leaf they replace.

An array may be committed to its devices, or JAX may move it. Its type may be weak. It may be float64 even if 64-bit
mode is off. JAX keeps these properties in its own computations, but they are lost on the way through NumPy.
"""

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.extend.core.primitives import convert_element_type_p


def put(data: Sequence[np.ndarray], likes: Sequence[Any]) -> list[jax.Array]:
    """Return the data as JAX arrays, each on the device of its entry in `likes`, and committed if that entry is."""
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
    """Return a result like the untraced leaf it was computed from: a NumPy array, uncommitted, or weakly typed."""
    if of_numpy(leaf):
        # Copy, because a NumPy view of a JAX array is read-only.
        return np.array(array)[()] if isinstance(leaf, np.generic) else np.array(array)
    if isinstance(leaf, jax.Array) and not leaf.committed and _place(array) != _place(leaf):
        # JAX may have moved an uncommitted array to the device of other leaves, or to its default device.
        (array,) = put([np.array(array.addressable_data(0))], [leaf])
    return typed_like(array, leaf)


def of_numpy(leaf: object) -> bool:
    """Say whether a leaf is a NumPy array or scalar."""
    return isinstance(leaf, np.ndarray | np.generic)


def typed_like(array: jax.Array, leaf: object) -> jax.Array:
    """Return the array, weakly typed if the leaf is."""
    weak = type(leaf) in (int, float, complex) or getattr(leaf, "weak_type", False)
    if not weak or array.weak_type:
        return array
    # No public JAX function does this, only the primitive.
    return convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def placed_first(leaves: Sequence[Any]) -> Any:
    """Return the leaf that decides the device of a scalar result: the first committed array, else the first array."""
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    return next((x for x in arrays if x.committed), arrays[0] if arrays else None)


def _place(like: object) -> Hashable:
    return (like.sharding, like.committed) if isinstance(like, jax.Array) else None


def _put(data: Sequence[np.ndarray], like: object) -> list[jax.Array]:
    # One call takes half the time of a call for each array.
    with _mode_for(data):
        if not isinstance(like, jax.Array):
            return jax.device_put(list(data))
        if like.committed:
            return jax.device_put(list(data), like.sharding)
        (device,) = like.devices()
        with jax.default_device(device):
            return jax.device_put(list(data))


def _mode_for(data: Sequence[np.ndarray]) -> AbstractContextManager[Any]:
    """Return a context in which JAX keeps the dtypes of the data."""
    wide = any(x.dtype.char in "dD" for x in data)
    return jax.enable_x64(True) if wide else nullcontext()
