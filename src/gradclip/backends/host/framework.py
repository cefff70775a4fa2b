"""The registry's entry point for NumPy."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradclip.backends.framework import Framework
from gradclip.backends.host.arrays import HostArray
from gradclip.backends.host.backend import HOST, Host, backend
from gradclip.core.formats import BFLOAT16, bare_name


class NumPy(Framework):
    """Arrays in host memory."""

    namespace = HOST.xp
    backend = staticmethod(backend)

    def on_fast_path(self, leaves: Sequence[Any]) -> Host | None:
        return HOST

    def gradients_of(self, parameters: Sequence[Any]) -> Sequence[Any] | None:
        return parameters  # in a tree of arrays, the arrays are the gradients themselves

    def on_host(self, leaf: object) -> HostArray:
        return HostArray.of(np.asarray(leaf))

    def as_float(self, array: object) -> np.ndarray:
        return np.asarray(array, np.float64)

    def kept(self, array: Any) -> np.ndarray:
        return np.array(array)

    def like(self, leaf: Any, dtype: str, values: np.ndarray) -> np.ndarray:
        return values.astype(leaf.dtype if bare_name(leaf.dtype) == dtype else dtype_named(dtype))

    def zeros(self, shape: tuple[int, ...], leaf: Any) -> np.ndarray:
        return np.zeros(shape, leaf.dtype)


def dtype_named(dtype: str) -> Any:
    """Return the NumPy dtype with this name. bfloat16 comes from `ml_dtypes`, which JAX installs."""
    if dtype != BFLOAT16.name:
        return np.dtype(dtype)
    # Imported late, because gradclip does not require it.
    import ml_dtypes

    return ml_dtypes.bfloat16


NUMPY = NumPy()
