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
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from gradclip._src import native
from gradclip._src.backends.framework import Framework
from gradclip._src.backends.host import chunkwise, exact
from gradclip._src.backends.host.arrays import HostArray, HostArrays, OnlyFinite, known_to_buffers, split, viewed_arrays
from gradclip._src.backends.host.laid import clamp_, forget_copies, indices_written, laid, scale_, scale_known, table_of
from gradclip._src.backends.portable import Portable
from gradclip._src.backends.sums import ENOUGH, examples_sum_error, filled, kernels_sum_error
from gradclip._src.core.arrays import Arrays, checked_dtype
from gradclip._src.core.formats import BFLOAT16, FLOAT64, SUPPORTED, bare_name, is_complex, sum_dtype
from gradclip._src.core.layouts import Groups, Layout, Scope, Several
from gradclip._src.core.memory import Region, region_of_array
from gradclip._src.core.norms import Norm, Order
from gradclip._src.core.protocols import HostBackend
from gradclip._src.core.rules import Into
from gradclip._src.core.values import Array

if TYPE_CHECKING:
    from gradclip._src.core.rules import Coefficient, Rule
    from gradclip._src.native._kernels import Arrays as KernelArrays

_COPIED = 1 << 18  # numbers at a time, small enough for the copies to stay in cache
ARRAYS = {np.ndarray}
DTYPES = {np.dtype(name) for name in ("float16", "float32", "float64")}
_SCALARS = {"float32": np.float32, "float64": np.float64}
_is_writeable = attrgetter("flags.writeable")


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


class Host(Portable):
    """The backend for NumPy arrays."""

    concrete = True
    visible = True
    splits_by_range = False
    immutable = False

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

    def leave_scalar(self, value: object, dtype: str, leaves: Sequence[Any]) -> Any:
        return np.asarray(value).astype(dtype)[()]

    def leave_each(self, values: Any, dtype: str, leaves: Sequence[Any]) -> list[Any]:
        return list(values.astype(dtype)) if isinstance(values, np.ndarray) else [x.astype(dtype)[()] for x in values]

    known_writable = False  # whether the kernels accept only writable arrays; they also read NumPy's read-only ones

    def writable(self, leaves: Sequence[Any]) -> bool:
        if set(map(type, leaves)) <= {np.ndarray}:
            return all(map(_is_writeable, leaves))
        return all(isinstance(leaf, np.ndarray) and leaf.flags.writeable for leaf in leaves)

    def empty_like(self, x: HostArray) -> HostArray:
        """Return an array for a result, with the same memory order."""
        return HostArray(np.empty_like(x.data), x.dtype)

    def without_nonfinite(self, arrays: Arrays) -> Arrays:
        return OnlyFinite(list(arrays))

    def norms_of_several(self, arrays: Arrays, order: Order, layout: Several) -> Norm:
        """Return all norms of a layout as a vector; none is sure if the kernels do not compute them."""
        found = laid(arrays, layout, self.threads())
        norm = None if found is None else found.norms(order)
        return norm or Norm(np.zeros(layout.count), None, 0.0, 0.0, np.zeros(layout.count, bool))

    def shrink(self, arrays: Arrays, coefficient: Coefficient, layout: Layout) -> list[Any]:
        zeroed = isinstance(arrays, OnlyFinite)
        made = None if zeroed else self._shrunk_at_once(arrays, coefficient, layout)
        if made is not None:
            return made
        results = self._filled_copies(arrays)
        for y in results if zeroed else ():
            y.put_zeros()
        scale_(viewed_arrays(results), coefficient, layout, self.threads())
        return results

    def _shrunk_at_once(self, arrays: Arrays, coefficient: Coefficient, layout: Layout) -> list[Any] | None:
        """Return the results of one call of the kernels; None if they cannot do it."""
        if layout.whole and coefficient.keep:
            return self.copies(arrays)  # not `copied`: they need no description
        groups = laid(arrays, layout, self.threads()) if isinstance(layout, Groups) else None
        known, others = split(arrays)
        whole = layout.whole and known and not others
        if not whole and (groups is None or groups.beyond or np.any(coefficient.blank)):
            return None
        results, targets = self.places_for(arrays)
        if targets is None:
            return None
        if groups is None:
            scale_known(known, targets, coefficient, self.threads())
        else:
            groups.scale(table_of(coefficient.keep, coefficient), targets)
        return results

    def _filled_copies(self, arrays: Arrays) -> list[HostArray]:
        """Return copies in memory from `empty_like`, which a framework can align as it needs."""
        results = [self.empty_like(x) for x in arrays]
        known, others = split(arrays)
        places = None if others else split(viewed_arrays(results))[0]
        if known and places and all(x.data.strides == y.data.strides for x, y in zip(arrays, results, strict=True)):
            # Use several threads: most of the time goes into new memory pages.
            table = native.describe_buffers([np.ones((5, 1))]).kernels
            known.scale_groups(places, [0] * len(results), table, 1, self.threads())
            return results
        for x, y in zip(arrays, results, strict=True):
            y.data[...] = x.data
        return results

    def places_for(self, arrays: Arrays) -> tuple[list[Any], Any]:
        """Return new arrays for results and their description for the kernels, or None if the memory order differs."""
        if arrays and isinstance(arrays.sources[0], np.ndarray):  # avoids creating views, which takes long
            sources = arrays.sources
            results: list[Any] = list(map(np.empty_like, sources))
            targets = results
        else:
            sources, results = [x.data for x in arrays], [self.empty_like(x) for x in arrays]
            targets = [x.data for x in results]
        plain = {x.dtype for x in targets} <= DTYPES
        known = native.describe_buffers(targets if plain else list(map(known_to_buffers, targets)))
        given = split(arrays)[0]
        in_order = given is not None and known.kernels is not None and given.in_order and known.kernels.in_order
        # Else no kernel fits.
        same_order = in_order or all(x.strides == y.strides for x, y in zip(sources, targets, strict=True))
        return results, known.kernels if same_order and not known.left_out else None

    def scale(self, arrays: Arrays, coefficient: Any, layout: Layout, into: Into | None = None) -> Sequence[Any]:
        if into is None:
            return self.shrink(arrays, coefficient, layout)
        if into.leaves is None:
            self._scale_in_place(arrays, coefficient, layout, into.arrays)
            return into.arrays
        # What is not clipped is not written.
        written, leaves = indices_written(into.arrays, arrays, coefficient, layout), into.leaves
        if not written:
            return leaves
        if (arrays is into.arrays and self._all_known(arrays)) or self.writable(leaves):
            self._scale_in_place(arrays, coefficient, layout, into.arrays)
            self.wrote(leaves if len(written) == len(leaves) else [leaves[index] for index in written])
            return leaves
        results, updated = self.shrink(arrays, coefficient, layout), list(leaves)
        for index in written:
            updated[index] = self.put(leaves[index], into.arrays[index], results[index])
        return updated

    def _scale_in_place(self, new: Arrays, coefficient: Coefficient, layout: Layout, arrays: Arrays) -> None:
        """Scale arrays, whatever objects hold their memory, from the values in `new`."""
        if new is not arrays:
            for x in arrays:  # `new` is a view of these arrays without non-finite elements
                x.put_zeros()
            forget_copies(arrays)
        scale_(arrays, coefficient, layout, self.threads())

    def clamp(self, arrays: Arrays, bound: Any, into: Into | None = None) -> Sequence[Any]:
        leaves = None if into is None else into.leaves
        if leaves is not None and (self._all_known(arrays) or self.writable(leaves)):
            clamp_(arrays, bound, self.threads())
            self.wrote(leaves)
            return leaves
        with self.precision():
            copies = self.copied(arrays)
            clamp_(copies, bound, self.threads())
        return copies.sources if into is None else self.write(copies, into)

    def write(self, results: Sequence[Any], into: Into) -> Sequence[Any]:
        return list(map(self.put, into.leaves, into.arrays, results))

    def _all_known(self, arrays: Arrays) -> bool:
        """Say whether the kernels can write all of the arrays."""
        known, others = split(arrays)
        return self.known_writable and known is not None and not others

    def put(self, leaf: Any, x: HostArray, result: HostArray | np.ndarray) -> Any:
        """Write a result into the gradient, or return a replacement."""
        if not self.writable([leaf]):
            return self.leave(result, leaf)
        x.data[...] = result.data if isinstance(result, HostArray) else known_to_buffers(result)
        self.wrote([leaf])
        return leaf

    def copies(self, arrays: Arrays) -> list[Any]:
        """Return copies of the arrays in the same memory order."""
        return [x.copy() for x in arrays]

    def copied(self, arrays: Arrays) -> HostArrays:
        return viewed_arrays(self.copies(arrays))

    count_nonfinite = staticmethod(chunkwise.count_nonfinite)
    weighted_sum = staticmethod(chunkwise.weighted_sum)
    rounded_sum = staticmethod(chunkwise.rounded_sum)

    def examples_error(self, arrays: Arrays, count: int) -> float:
        return examples_sum_error(count)

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


class ImmutableHost(Host):
    """The backend for a framework whose arrays never change, so that what is kept needs no copy."""

    def shrink(self, arrays: Arrays, coefficient: Coefficient, layout: Layout) -> list[Any]:
        if layout.whole and coefficient.keep and not isinstance(arrays, OnlyFinite):
            return list(arrays)
        results = super().shrink(arrays, coefficient, layout)
        if layout.whole or isinstance(arrays, OnlyFinite):
            return results
        changed = set(indices_written(arrays, arrays, coefficient, layout))
        return [y if index in changed else x for index, (x, y) in enumerate(zip(arrays, results, strict=True))]


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
