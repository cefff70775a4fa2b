"""Arrays of any framework in host memory, and arrays of a framework made of NumPy's."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradclip.backends.arrays import check_dtypes
from gradclip.backends.formats import BFLOAT16, FLOAT64, dtype_name
from gradclip.backends.framework import Framework
from gradclip.backends.host.arrays import HostArray, widened
from gradclip.backends.registry import entry_of, load, named

_WHOLE = ("int", "uint", "qint", "quint")


def framework_of(leaf: object) -> Framework:
    """Return the framework of an array. What none knows goes to NumPy, which makes arrays of much else."""
    return load(entry_of(leaf) or named("numpy"))


def host_arrays(leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> list[HostArray]:
    """Return leaves as arrays in host memory, copied there only from devices; integers become float64, exactly.

    Raises TypeError for dtypes that no gradient has, and ValueError for integers that float64 does not hold.
    """
    # A wrong dtype is an error before anything is copied from a device. Integers pass: they become float64 below, and
    # quantized tensors have an error of their own, from `on_host`.
    known = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype") and not dtype_name(leaf).startswith(_WHOLE)]
    check_dtypes([leaves[i] for i in known], lambda: [names()[i] or "the tree" for i in known])
    arrays = [framework_of(leaf).on_host(leaf) for leaf in leaves]
    for index, x in enumerate(arrays):
        if x.data.dtype.kind in "iu" and x.dtype != BFLOAT16.name:
            # As Python's integers: the absolute value of the smallest int64 is negative in NumPy.
            if x.size and max(int(x.data.max()), -int(x.data.min())) > 2**FLOAT64.precision:
                raise ValueError(
                    f"{names()[index] or 'the tree'} holds integers beyond 2**53; convert them to float64."
                )
            arrays[index] = HostArray.of(x.data.astype(np.float64))
    # Once more: what had no dtype before, such as a list, has one now.
    check_dtypes(arrays, lambda: [name or "the tree" for name in names()])
    return arrays


def fetched(values: Sequence[Any]) -> list[np.ndarray]:
    """Return the numbers in arrays of any frameworks, flat, in float64. Those of a device are waited for together."""
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
    """Return the real and imaginary parts of an array, or the array, flat: in float64, or integers.

    Raises TypeError for a sparse array.
    """
    framework = framework_of(leaf)
    sparse = framework.first_sparse([leaf])
    if sparse is not None:
        raise TypeError(f"arrays to be compared must be dense, got {sparse.kind}. Call {sparse.method} on it.")
    array = framework.on_host(leaf)
    if array.data.dtype.kind in "biu" and array.dtype != BFLOAT16.name:
        # As they are: float64 does not hold all integers of 64 bits.
        return [array.data.reshape(-1)]
    return [widened(part.data.reshape(-1), part.dtype) for part in array.parts()]
