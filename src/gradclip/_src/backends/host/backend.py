"""The backend for arrays in host memory: NumPy arrays, and views of other frameworks' CPU arrays.

Values are known here, so work that they make unnecessary is skipped. The kernels process all arrays they can read in
one call. All other arrays are processed chunk by chunk.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from gradclip._src import native
from gradclip._src.backends.framework import Framework
from gradclip._src.backends.host import chunkwise
from gradclip._src.backends.host.arrays import HostArray, HostArrays, known_to_buffers, split, viewed_arrays
from gradclip._src.backends.host.in_host_memory import ARRAYS, DTYPES
from gradclip._src.backends.host.protocol import HostBackend
from gradclip._src.backends.host.scaling import Scaling
from gradclip._src.backends.sums import ENOUGH, examples_sum_error, filled, kernels_sum_error
from gradclip._src.core.arrays import Arrays, checked_dtype
from gradclip._src.core.formats import BFLOAT16, FLOAT64, SUPPORTED, bare_name, is_complex, sum_dtype
from gradclip._src.core.memory import Region, region_of_array
from gradclip._src.core.scopes import Scope
from gradclip._src.core.values import Array

if TYPE_CHECKING:
    from gradclip._src.core.records import Rule
    from gradclip._src.native._kernels import Arrays as KernelArrays

_COPIED = 1 << 18  # numbers at a time, small enough for the copies to stay in cache


class Namespace(ModuleType):
    """The array API standard's operations for NumPy arrays, imported when the first one is used.

    The import takes a quarter of the time that importing gradclip takes, including NumPy.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python itself asks for these, for example when a class gets this as an attribute
            raise AttributeError(name)
        value = getattr(importlib.import_module("array_api_compat.numpy"), name)
        setattr(self, name, value)  # so that Python finds it next time without this method
        return value


class Host(Scaling):
    """The backend for NumPy arrays."""

    concrete = True
    visible = True
    splits_by_range = False

    def __init__(self) -> None:
        super().__init__(Namespace("gradclip._src.backends.host.namespace"), FLOAT64)

    def precision(self) -> AbstractContextManager[Any]:
        # Overflow to infinity is a valid result here, so NumPy must not warn.
        return np.errstate(all="ignore")

    def prepare(self, leaf: object) -> np.ndarray:
        if type(leaf) is np.ndarray and bare_name(leaf.dtype) in SUPPORTED:
            return leaf
        return checked_dtype(np.asarray(leaf))

    def prepare_in_place(self, leaf: object) -> Any:
        return np.asarray(leaf)

    def plain(self, leaves: Sequence[Any]) -> bool:
        return True

    def arrays_of(self, leaves: Sequence[Any], kernels: KernelArrays) -> HostArrays:
        return HostArrays(leaves, HostArray.of, native.Described(kernels, ()))

    def take(self, leaves: Sequence[Any]) -> HostArrays:
        if set(map(type, leaves)) == ARRAYS and {leaf.dtype for leaf in leaves} <= DTYPES:
            return HostArrays(leaves, HostArray.of, native.describe_buffers(leaves))
        return self.enter(list(map(self.prepare, leaves)))

    def enter(self, prepared: Sequence[Any]) -> HostArrays:
        return HostArrays(prepared, HostArray.of, native.describe_buffers(list(map(known_to_buffers, prepared))))

    def chosen(self, arrays: Arrays, indices: Sequence[int]) -> HostArrays:
        return viewed_arrays([arrays[index] for index in indices])

    def region(self, leaf: object) -> Region | None:
        return region_of_array(leaf) if isinstance(leaf, np.ndarray) else None

    def collide(self, leaves: Sequence[Any], arrays: Arrays) -> bool:
        if not isinstance(arrays, HostArrays) or not arrays.kernels:
            return super().collide(leaves, arrays)
        others = [self.region(leaves[index]) for index in arrays.left_out]
        return bool(arrays.kernels.overlap([(region.address, region.end) for region in others if region]))

    def leave_all(self, arrays: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        if set(map(type, arrays)) == ARRAYS == set(map(type, leaves)) and {x.dtype for x in arrays} <= DTYPES:
            return list(arrays)
        return super().leave_all(arrays, leaves)

    def leave(self, array: HostArray | np.ndarray, leaf: Any) -> Any:
        data = array.data if isinstance(array, HostArray) else array
        data = data if data.dtype != np.uint16 else data.view(leaf.dtype)  # the bits of bfloat16
        return data if isinstance(leaf, np.ndarray) else data[()]

    def leave_sum(self, wide: np.ndarray, x: HostArray, dtype: str | None) -> Any:
        return wide.astype(sum_dtype(x, wide, dtype))

    def scalar(self, value: float | Array, near: Sequence[Array]) -> Any:
        return np.float64(value)

    def booleans(self, mask: object) -> np.ndarray:
        return np.asarray(mask, dtype=bool)

    def zeros(self, shape: tuple[int, ...], near: Sequence[Any]) -> Any:
        return np.zeros(shape)[()]  # a scalar if a reduction would return one

    def differentiable(self, function: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        # Values known to the host have no derivative.
        return function

    def total(self, terms: Sequence[Any]) -> Any:
        # Add array by array: the order of additions in `np.sum` may depend on the number of examples.
        return functools.reduce(np.add, terms)

    def sum_error(self, count: int, arrays: Arrays, p: float, scope: Scope) -> float:
        known, others = split(arrays, scope)
        if known and not others:
            return kernels_sum_error(count, arrays.only_halves, p)
        error = super().sum_error(count, arrays, p, scope)
        # `error` already covers the additions.
        return error + kernels_sum_error(0, arrays.only_halves, p) if known else error

    def power_sum(self, arrays: Arrays, p: float, scope: Scope, divisor: Any = None) -> Any:
        known, others = split(arrays, scope)
        sums = [chunkwise.power_sum_of(x, p, scope, divisor) for x in others]
        if known:
            total, _ = known.sum(p, 1.0 if divisor is None else divisor, arrays.only_halves, self.threads())
            sums.append(np.float64(total))
        return self.total(sums)

    def scaled_power_sum(self, arrays: Arrays, p: float, scope: Scope) -> tuple[Any, Any]:
        if p in (1, 2):
            total = self.power_sum(arrays, p, scope)  # usually enough: the sum shows whether terms were lost
            enough = (total > ENOUGH) & np.isfinite(total)
            if np.all(enough):
                return total, None
            # In a batch, redo only the examples that need it: no example may change the last bits of another.
            again: tuple[Any, Any] = super().scaled_power_sum(arrays, p, scope)
            return np.where(enough, total, again[0])[()], np.where(enough, 1.0, again[1])[()]
        total, divisor = super().scaled_power_sum(arrays, p, scope)
        # Return an array: NumPy's square roots of arrays and of scalars can differ in the last bit.
        return np.asarray(total), divisor

    def largest(self, arrays: Arrays, scope: Scope) -> Any:
        known, others = split(arrays, scope)
        found = [chunkwise.largest_of(x, scope) for x in filled(others, scope)]
        if known and known.count:
            found.append(known.extremes(self.threads())[0])
        return np.max(np.stack(found), axis=0)

    def smallest(self, arrays: Arrays, scope: Scope) -> Any:
        known, others = split(arrays, scope)
        found = [chunkwise.smallest_of(x, scope) for x in filled(others, scope)]
        if known and known.count:
            _, smallest, nonfinite = known.extremes(self.threads())
            found.append(math.nan if nonfinite else smallest)  # a minimum would ignore them
        return np.min(np.stack(found), axis=0)

    def quartered(self, arrays: Arrays) -> Arrays:
        return viewed_arrays([x.quartered() for x in arrays])

    def redo_where(self, flags: Any, compute: Callable[[], tuple[Array, Array]], found: tuple[Array, Array]) -> Any:
        return super().redo_where(flags, compute, found) if np.any(flags) else found

    count_nonfinite = staticmethod(chunkwise.count_nonfinite)
    weighted_sum = staticmethod(chunkwise.weighted_sum)
    rounded_sum = staticmethod(chunkwise.rounded_sum)
    examples_error = staticmethod(examples_sum_error)

    def add_examples(
        self, arrays: Arrays, weighing: Rule, mask: Any, *, spoil: bool
    ) -> tuple[list[np.ndarray], np.ndarray] | None:
        # `spoil` matters only for backends that cannot read values.
        known = arrays if isinstance(arrays, HostArrays) else viewed_arrays(list(arrays))
        return _add_examples(known, weighing, mask, self.threads())


def _add_examples(
    arrays: HostArrays, weighing: Sequence[float], mask: np.ndarray | None, threads: int
) -> tuple[list[np.ndarray], np.ndarray] | None:
    """Return each array's weighted sum over examples, in float64, and each example's norm.

    The norm is 0 for examples outside `mask`. An example with a non-finite sum of squares adds nothing. Returns None if
    the kernels cannot read all of the arrays.
    """
    examples = arrays[0].shape[0]
    # The kernels read this vector first: NaN means that the example is left out.
    squares = np.zeros(examples) if mask is None else np.where(mask, 0.0, np.nan)
    widths = [math.prod(x.shape[1:]) * (2 if is_complex(x) else 1) for x in arrays]
    totals = np.zeros(max(1, sum(widths)))
    for rows in _blocks(arrays, sum(widths)):
        known, left_out = arrays.kernels, arrays.left_out
        if not all(x.data.flags.c_contiguous for x in arrays):
            # The kernels need each example to be contiguous.
            known, left_out = native.describe_buffers([np.ascontiguousarray(x.data[rows]) for x in arrays])
        if not known or left_out:
            return None
        buffers = [native.describe_buffers([buffer]).kernels for buffer in (squares[rows], totals)]
        some = len(squares[rows])
        native.kernels.add_examples(known, some, list(map(float, weighing)), buffers[0], buffers[1], threads)
    if not examples:
        return None
    ends = np.cumsum(widths)
    sums = [
        totals[end - width : end].view(np.complex128 if is_complex(x) else np.float64).reshape(x.shape[1:])
        for x, width, end in zip(arrays, widths, ends, strict=True)
    ]
    # Examples outside the mask still have their NaN mark.
    return sums, np.sqrt(squares if mask is None else np.where(mask, squares, 0.0))


def _blocks(arrays: HostArrays, width: int) -> list[slice]:
    """Return slices of the examples: one slice for contiguous arrays, otherwise blocks small enough to copy."""
    examples = arrays[0].shape[0]
    if all(x.data.flags.c_contiguous for x in arrays):
        return [slice(0, examples)] if examples else []
    many = max(1, _COPIED // max(1, width))
    return [slice(start, start + many) for start in range(0, examples, many)]


HOST = Host()
_checked: type[HostBackend] = Host


class NumPy(Framework):
    """Arrays in host memory."""

    namespace = HOST.xp

    def backend(self, leaves: Sequence[Any], scalars: Sequence[Any]) -> Host:
        return HOST

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

    generator = "a numpy.random.Generator"

    def noised(self, leaves: Sequence[Any], std: float, rng: Any) -> list[np.ndarray] | None:
        if not isinstance(rng, np.random.Generator):
            return None
        return [(x + std * rng.standard_normal(np.shape(x))).astype(x.dtype) for x in leaves]

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
