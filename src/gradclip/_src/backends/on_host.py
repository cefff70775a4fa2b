"""Convert arrays of any framework to arrays in host memory, and read their numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradclip._src.backends.framework import Framework
from gradclip._src.backends.host.arrays import HostArray, widened
from gradclip._src.backends.registry import entry_of, load, named
from gradclip._src.core.arrays import check_dtypes, raise_named
from gradclip._src.core.formats import BFLOAT16, dtype_name, is_quantized_name


def framework_of(leaf: object) -> Framework:
    """Return an array's framework. Anything unknown goes to NumPy, which can make arrays of many other things."""
    return load(entry_of(leaf) or named("numpy"))


def host_arrays(leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> list[HostArray]:
    """Return leaves as arrays in host memory, copied only from devices. Raises TypeError for unsupported dtypes."""
    # Report a wrong dtype before copying anything from a device. For quantized tensors, `on_host` has its own error.
    known = [i for i, x in enumerate(leaves) if hasattr(x, "dtype") and not is_quantized_name(dtype_name(x))]
    check_dtypes([leaves[i] for i in known], lambda: [names()[i] or "the tree" for i in known])
    try:
        arrays = list(map(_on_host, leaves))
    except TypeError:
        raise_named(_on_host, leaves, lambda: [name or "the tree" for name in names()])
        raise
    # Check again: lists and the like had no dtype before the conversion.
    check_dtypes(arrays, lambda: [name or "the tree" for name in names()])
    return arrays


def _on_host(leaf: object) -> HostArray:
    return framework_of(leaf).on_host(leaf)


def fetched(values: Sequence[Any]) -> list[np.ndarray]:
    """Return the numbers in arrays of any framework as flat float64 arrays. Waits once for all arrays of a device."""
    found: dict[int, np.ndarray] = {}
    places: dict[Framework, list[int]] = {}
    for index, value in enumerate(values):
        if type(value) is float:
            found[index] = np.array([value])
        else:
            places.setdefault(framework_of(value), []).append(index)
    for framework, indices in places.items():
        found.update(zip(indices, framework.numbers([values[index] for index in indices]), strict=True))
    return [found[index] for index in range(len(values))]


def numbers_of(leaf: object) -> list[np.ndarray]:
    """Return an array's numbers flat, in float64 or as integers; for a complex array, the real and imaginary parts.

    Raises TypeError for a sparse array.
    """
    framework = framework_of(leaf)
    sparse = framework.first_sparse([leaf])
    if sparse is not None:
        raise TypeError(f"arrays to compare must be dense, got {sparse.kind}. Call {sparse.method} on it.")
    array = framework.on_host(leaf)
    if array.data.dtype.kind in "biu" and array.dtype != BFLOAT16.name:
        # Kept as integers: float64 cannot hold every 64-bit integer.
        return [array.data.reshape(-1)]
    return [widened(part.data.reshape(-1), part.dtype) for part in array.parts()]
