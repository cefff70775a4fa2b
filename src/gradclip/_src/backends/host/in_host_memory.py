"""The `HostBackend` methods for arrays in host memory: descriptions for the kernels, new arrays and scalars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradclip._src import native
from gradclip._src.backends.host import exact
from gradclip._src.core.arrays import Arrays

if TYPE_CHECKING:
    from gradclip._src.native._kernels import Arrays as KernelArrays

ARRAYS = {np.ndarray}
DTYPES = {np.dtype(name) for name in ("float16", "float32", "float64")}
_SCALARS = {"float32": np.float32, "float64": np.float64}


class InHostMemory:
    """The methods for NumPy arrays."""

    def known(self, leaves: Sequence[Any]) -> KernelArrays | None:
        # 16-bit integers would be mistaken for bfloat16.
        ordinary = set(map(type, leaves)) == ARRAYS and {leaf.dtype for leaf in leaves} <= DTYPES
        if native.kernels is None or not ordinary:
            return None
        kernels, left_out = native.kernels.describe_buffers(list(leaves))
        return None if left_out else kernels

    def at_most(self, arrays: Arrays, p: float, max_norm: float, part: tuple[Any, ...] | None = None) -> bool:
        return exact.at_most(self, arrays if part is None else exact.part_of(arrays, part), p, max_norm)

    def new_like(self, leaves: Sequence[Any], *, copied: bool) -> list[Any]:
        return [leaf.copy() for leaf in leaves] if copied else list(map(np.empty_like, leaves))

    def number(self, value: float, dtype: str) -> Any:
        return _SCALARS[dtype](value)

    def array(self, values: np.ndarray | np.generic, dtype: str) -> Any:
        return values.astype(dtype)

    def write_back(self, leaf: Any, copy: Any) -> None:
        leaf[...] = copy

    def leave_count(self, flags: Any, leaves: Sequence[Any]) -> Any:
        return np.sum(flags)

    def threads(self) -> int:
        return native.default_threads()

    def wrote(self, leaves: Sequence[Any]) -> None:
        """Do nothing: NumPy does not track changes."""

    def leave_scalars(self, values: object, dtype: str, leaves: Sequence[Any]) -> list[Any]:
        return list(self.array(np.asarray(values), dtype))

    def leave_scalar(self, value: object, dtype: str, leaves: Sequence[Any]) -> Any:
        return np.asarray(value).astype(dtype)[()]

    def leave_vectors(self, values: Sequence[np.ndarray], dtype: str, leaves: Sequence[Any]) -> list[Any]:
        return [self.leave_scalar(value, dtype, [leaf]) for value, leaf in zip(values, leaves, strict=True)]
