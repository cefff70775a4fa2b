"""The backend for arrays in host memory: NumPy arrays, and views of other frameworks' CPU arrays.

Values are known here, so work that they make unnecessary is skipped. The kernels process all arrays they can read in
one call. All other arrays are processed chunk by chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from gradclip import native
from gradclip.backends.host import chunkwise, examples
from gradclip.backends.host.arrays import HostArray, HostArrays, OnlyFinite, known_to_buffers, split, viewed_arrays
from gradclip.backends.host.in_host_memory import ARRAYS, DTYPES, InHostMemory
from gradclip.backends.host.in_place import clamp_, indices_written, scale_, scale_known
from gradclip.backends.host.laid import factors_of, forget_copies, laid
from gradclip.backends.host.namespace import Namespace
from gradclip.backends.host.protocol import HostBackend
from gradclip.backends.portable import Portable
from gradclip.backends.sums import ENOUGH, examples_sum_error, filled, kernels_sum_error
from gradclip.core.arrays import Arrays, checked_dtype
from gradclip.core.formats import SUPPORTED, bare_name, sum_dtype
from gradclip.core.layouts import Groups, Layout, Several
from gradclip.core.memory import Region, region_of_array
from gradclip.core.norms import Norm, Order
from gradclip.core.scopes import Scope
from gradclip.core.values import Array

if TYPE_CHECKING:
    from gradclip.core.records import Coefficient, Rule

_is_writeable = attrgetter("flags.writeable")


class Host(InHostMemory, Portable):
    """The backend for NumPy arrays."""

    concrete = True
    visible = True
    splits_by_range = False
    known_writable = False  # whether the kernels accept only writable arrays; they also read NumPy's read-only ones

    def __init__(self) -> None:
        super().__init__(Namespace("gradclip.backends.host.namespace"))

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

    def arrays_of(self, leaves: Sequence[Any], kernels: Any) -> HostArrays:
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

    def writable(self, leaf: object) -> bool:
        return isinstance(leaf, np.ndarray) and leaf.flags.writeable

    def can_write(self, leaves: Sequence[Any], arrays: Arrays) -> bool:
        return self._all_known(arrays) or self._all_writable(leaves)

    def _all_writable(self, leaves: Sequence[Any]) -> bool:
        if set(map(type, leaves)) <= {np.ndarray}:
            return all(map(_is_writeable, leaves))
        return all(map(self.writable, leaves))

    def empty_like(self, x: HostArray) -> HostArray:
        """Return an array for a result, with the same memory order."""
        return HostArray(np.empty_like(x.data), x.dtype)

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

    def chosen_where(self, flags: Any, compute: Callable[[], tuple[Array, Array]], found: tuple[Array, Array]) -> Any:
        return super().chosen_where(flags, compute, found) if np.any(flags) else found

    count_nonfinite = staticmethod(chunkwise.count_nonfinite)
    weighted_sum = staticmethod(chunkwise.weighted_sum)
    rounded_sum = staticmethod(chunkwise.rounded_sum)
    examples_error = staticmethod(examples_sum_error)

    def add_examples(
        self, arrays: Arrays, weighing: Rule, mask: Any, *, spoil: bool
    ) -> tuple[list[np.ndarray], np.ndarray] | None:
        # `spoil` matters only for backends that cannot read values.
        known = arrays if isinstance(arrays, HostArrays) else viewed_arrays(list(arrays))
        return examples.add_examples(known, weighing, mask, self.threads())

    def without_nonfinite(self, arrays: Arrays) -> Arrays:
        return OnlyFinite(list(arrays))

    def norms_at_once(self, arrays: Arrays, layout: Several, order: Order) -> tuple[Norm, np.ndarray] | None:
        found = laid(arrays, layout, self.threads())
        return None if found is None else found.norms(order)

    def shrink(self, arrays: Arrays, coefficient: Coefficient, layout: Layout) -> list[HostArray]:
        if isinstance(arrays, OnlyFinite):
            return self._shrunk_finite(arrays, coefficient, layout)
        if isinstance(layout, Groups):
            made = self._shrunk_groups(arrays, coefficient, layout)
            return made or self._shrunk_copies(self._filled_copies(arrays), coefficient, layout)
        if not layout.whole:
            return self._shrunk_copies(self._filled_copies(arrays), coefficient, layout)
        if coefficient.keep:
            return self.copies(arrays)
        results, targets = self.places_for(arrays)
        known, others = split(arrays)
        if known and not others and targets:
            scale_known(known, targets, coefficient, self.threads())
            return results
        return self._shrunk_copies(self._filled_copies(arrays), coefficient, layout)

    def _shrunk_groups(self, arrays: Arrays, coefficient: Coefficient, layout: Groups) -> list[Any]:
        """Return the results of one call of the kernels; an empty list if they cannot do it."""
        known = laid(arrays, layout, self.threads())
        if known is None or known.beyond or np.any(coefficient.blank):
            return []
        results, targets = self.places_for(arrays)
        if targets is None:
            return []
        known.scale(coefficient.keep, factors_of(coefficient), targets)
        return results

    def _shrunk_copies(self, copies: list[HostArray], coefficient: Coefficient, layout: Layout) -> list[HostArray]:
        scale_(viewed_arrays(copies), coefficient, layout, self.threads())
        return copies

    def _filled_copies(self, arrays: Arrays) -> list[HostArray]:
        """Return copies in memory from `empty_like`, which a framework can align as it needs."""
        results = [self.empty_like(x) for x in arrays]
        known, others = split(arrays)
        places = None if others else split(viewed_arrays(results))[0]
        if known and places and all(x.data.strides == y.data.strides for x, y in zip(arrays, results, strict=True)):
            # Use several threads: most of the time goes into new memory pages.
            known.scale_groups(places, [0] * len(results), [True], [[1.0]] * 4, self.threads())
            return results
        for x, y in zip(arrays, results, strict=True):
            y.data[...] = x.data
        return results

    def places_for(self, arrays: Arrays) -> tuple[list[Any], Any]:
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

    def _shrunk_finite(self, arrays: OnlyFinite, coefficient: Coefficient, layout: Layout) -> list[HostArray]:
        results = self._filled_copies(arrays)
        for y in results:
            y.put_zeros()
        return self._shrunk_copies(results, coefficient, layout)

    def scale_(self, arrays: Arrays, new: Arrays, coefficient: Coefficient, layout: Layout) -> None:
        if new is not arrays:
            for x in arrays:  # `new` is a view of these arrays without non-finite elements
                x.put_zeros()
            forget_copies(arrays)
        scale_(arrays, coefficient, layout, self.threads())

    def update(
        self, leaves: Sequence[Any], arrays: Arrays, new: Arrays, coefficient: Coefficient, layout: Layout
    ) -> Sequence[Any]:
        # What is not clipped is not written.
        written = indices_written(coefficient, layout, len(leaves)) if new is arrays else range(len(leaves))
        if not written:
            return leaves
        if (new is arrays and self._all_known(arrays)) or self._all_writable(leaves):
            self.scale_(arrays, new, coefficient, layout)
            self.wrote(leaves if len(written) == len(leaves) else [leaves[index] for index in written])
            return leaves
        results, updated = self.shrink(new, coefficient, layout), list(leaves)
        for index in written:
            updated[index] = self.put(leaves[index], arrays[index], results[index])
        return updated

    def update_clamped(self, leaves: Sequence[Any], arrays: Arrays, bound: Any) -> Sequence[Any]:
        if self.can_write(leaves, arrays):
            clamp_(arrays, bound, self.threads())
            self.wrote(leaves)
            return leaves
        results = [x.copy() for x in arrays]
        clamp_(viewed_arrays(results), bound, self.threads())
        return [self.put(leaf, x, y) for leaf, x, y in zip(leaves, arrays, results, strict=True)]

    def _all_known(self, arrays: Arrays) -> bool:
        """Say whether the kernels can write all of the arrays."""
        known, others = split(arrays)
        return self.known_writable and known is not None and not others

    def put(self, leaf: Any, x: HostArray, result: HostArray | np.ndarray) -> Any:
        """Write a result into the gradient, or return a replacement."""
        if not self.writable(leaf):
            return self.leave(result, leaf)
        x.data[...] = result.data if isinstance(result, HostArray) else known_to_buffers(result)
        self.wrote([leaf])
        return leaf

    def clamped_all(self, prepared: Sequence[Any], leaves: Sequence[Any], bound: Any) -> list[Any]:
        with self.precision():
            copies = self.copies(self.enter(prepared))
            if copies:
                clamp_(self.entered_copies(copies), bound, self.threads())
            return self.leave_all(copies, leaves)

    def copies(self, arrays: Arrays) -> list[Any]:
        """Return copies of the arrays in the same memory order."""
        return [x.copy() for x in arrays]

    def entered_copies(self, copies: Sequence[Any]) -> HostArrays:
        """Return the result of `copies` as arrays."""
        return viewed_arrays(copies)


def backend(leaves: Sequence[Any], scalars: Sequence[Any]) -> Host:
    """Return the backend for NumPy arrays."""
    return HOST


HOST = Host()
_checked: type[HostBackend] = Host
