"""Arrays in host memory: NumPy's own, and views of other frameworks' CPU arrays.

Here values are known, so nothing is computed that a look at them makes needless. The kernels take all arrays that they
know in one call; the others, and all where there are no kernels, go chunk by chunk.
"""

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import numpy as np

from gradclip import native
from gradclip.backends import examples
from gradclip.backends.arrays import Arrays, checked_dtype
from gradclip.backends.chunkwise import Chunkwise
from gradclip.backends.formats import SUPPORTED, bare_name, dtype_name, format_of
from gradclip.backends.host import HostArray, HostArrays, OnlyFinite, known_to_buffers, split, viewed_arrays
from gradclip.backends.memory import Region, region_of_array
from gradclip.backends.portable import ENOUGH, filled
from gradclip.backends.protocols import Scope

_is_writeable = attrgetter("flags.writeable")


class _Namespace:
    """The operations of the array API standard over NumPy arrays, imported when the first of them is used.

    Importing them takes a quarter of the time of importing gradclip, NumPy included.
    """

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module("array_api_compat.numpy"), name)
        setattr(self, name, value)
        return value


class Host(Chunkwise):
    """Clipping over NumPy arrays."""

    concrete = True
    visible = True
    splits_by_range = False
    known_writable = False  # whether all that the kernels know can be written

    def __init__(self) -> None:
        super().__init__(_Namespace())

    def precision(self) -> AbstractContextManager[Any]:
        return np.errstate(all="ignore")

    # Frameworks whose arrays can be viewed as NumPy's change these.

    def threads(self) -> int:
        """Return how many threads a call may use."""
        return native.default_threads()

    def prepare(self, leaf: Any) -> np.ndarray:
        """Return a leaf as an array that can be clipped, integers promoted to the default float."""
        if type(leaf) is np.ndarray and bare_name(leaf.dtype) in SUPPORTED:
            return leaf
        array = np.asarray(leaf)
        return checked_dtype(array.astype(np.float64) if array.dtype.kind in "iu" else array)

    def prepare_in_place(self, leaf: Any) -> Any:
        return np.asarray(leaf)

    def plain(self, leaves: Sequence[Any]) -> bool:
        return native.kernels is not None

    def enter(self, prepared: Sequence[Any]) -> HostArrays:
        return HostArrays(prepared, HostArray.of, native.describe_buffers(list(map(known_to_buffers, prepared))))

    def chosen(self, arrays: Arrays, indices: Sequence[int]) -> HostArrays:
        return viewed_arrays([arrays[index] for index in indices])

    def region(self, leaf: Any) -> Region | None:
        return region_of_array(leaf) if isinstance(leaf, np.ndarray) else None

    def collide(self, leaves: Sequence[Any], arrays: Arrays) -> bool:
        if not isinstance(arrays, HostArrays) or not arrays.kernels:
            return super().collide(leaves, arrays)
        others = [self.region(leaves[index]) for index in arrays.left_out]
        return bool(arrays.kernels.overlap([(region.address, region.end) for region in others if region]))

    def writable(self, leaf: Any) -> bool:
        """Say whether a gradient can be written where it lies."""
        return isinstance(leaf, np.ndarray) and leaf.flags.writeable

    def can_write(self, leaves: Sequence[Any], arrays: Arrays) -> bool:
        """Say whether all gradients can be written where they lie; `arrays` are these gradients."""
        return self._all_known(arrays) or self._all_writable(leaves)

    def _all_writable(self, leaves: Sequence[Any]) -> bool:
        if set(map(type, leaves)) <= {np.ndarray}:
            return all(map(_is_writeable, leaves))
        return all(map(self.writable, leaves))

    def wrote(self, leaves: Sequence[Any]) -> None:
        """Take note that gradients have been written behind their framework's back."""

    def empty_like(self, x: HostArray) -> HostArray:
        """Return an array for a result, in the same memory order."""
        return HostArray(np.empty_like(x.data), x.dtype)

    def leave(self, array: Any, leaf: Any) -> Any:
        """Return a result as what the user passed: an array, or a number for a number."""
        data = array.data if isinstance(array, HostArray) else array
        data = data if data.dtype != np.uint16 else data.view(leaf.dtype)  # the bits of bfloat16
        return data if isinstance(leaf, np.ndarray) else data[()]

    def leave_sum(self, wide: np.ndarray, x: HostArray, dtype: str | None) -> Any:
        """Return a sum over examples of `x` in a dtype; None is float32 unless `x` has float64 precision."""
        return wide.astype(sum_dtype(x, wide, dtype))

    def leave_count(self, flags: np.ndarray, leaves: Sequence[Any]) -> Any:
        """Return how many flags, one for each example of the leaves, are set, as an integer scalar."""
        return np.sum(flags)

    def leave_scalar(self, value: Any, dtype: str, leaves: Sequence[Any]) -> Any:
        """Return a wide scalar, or a vector with one value an example, in the named dtype."""
        return np.asarray(value).astype(dtype)[()]

    def leave_scalars(self, values: Any, dtype: str, leaves: Sequence[Any]) -> list[Any]:
        """Return each of a vector of wide scalars in the named dtype; `leaves` holds those of each."""
        return list(self.leave_scalar(values, dtype, leaves))

    def scalar(self, value: Any, near: Any) -> Any:
        return np.float64(value)

    def booleans(self, mask: Any) -> np.ndarray:
        """Return a mask as a boolean array."""
        return np.asarray(mask, dtype=bool)

    def zeros(self, shape: tuple[int, ...], near: Sequence[Any]) -> Any:
        """Return wide zeros."""
        return np.zeros(shape)[()]

    def differentiable(self, function: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        """Return the function as it is: values known to the host carry no derivative."""
        return function

    # Reductions

    def total(self, terms: Sequence[Any]) -> Any:
        # One after the other, so that an example's sum does not depend on how many examples there are.
        return functools.reduce(np.add, terms)

    def sum_error(self, count: int, arrays: Arrays, p: float, scope: Scope) -> float:
        known, others = split(arrays, scope)
        if known and not others:
            return self.kernels_sum_error(count, arrays, p)
        error = super().sum_error(count, arrays, p, scope)
        return error + self.kernels_sum_error(0, arrays, p) if known else error

    def power_sum(self, arrays: Arrays, p: float, scope: Scope, divisor: Any = None) -> Any:
        known, others = split(arrays, scope)
        sums = [self.power_sum_of(x, p, scope, divisor) for x in others]
        if known:
            total, _ = known.sum(p, 1.0 if divisor is None else divisor, arrays.only_halves, self.threads())
            sums.append(np.float64(total))
        return self.total(sums)

    def scaled_power_sum(self, arrays: Arrays, p: float, scope: Scope) -> tuple[Any, Any]:
        if p in (1, 2):
            total = self.power_sum(arrays, p, scope)
            enough = (total > ENOUGH) & np.isfinite(total)
            if np.all(enough):
                return total, None
            # Of a batch only those that need it: no example may change the last bits of another.
            scaled, divisor = super().scaled_power_sum(arrays, p, scope)
            return np.where(enough, total, scaled)[()], np.where(enough, 1.0, divisor)[()]
        return super().scaled_power_sum(arrays, p, scope)

    def largest(self, arrays: Arrays, scope: Scope) -> Any:
        known, others = split(arrays, scope)
        found = [self.largest_of(x, scope) for x in filled(others, scope)]
        if known and known.count:
            found.append(known.extremes(self.threads())[0])
        return np.max(np.stack(found), axis=0)

    def smallest(self, arrays: Arrays, scope: Scope) -> Any:
        known, others = split(arrays, scope)
        found = [self.smallest_of(x, scope) for x in filled(others, scope)]
        if known and known.count:
            _, smallest, nonfinite = known.extremes(self.threads())
            found.append(math.nan if nonfinite else smallest)
        return np.min(np.stack(found), axis=0)

    def quartered(self, arrays: Arrays) -> Arrays:
        return viewed_arrays([x.quartered() for x in arrays])

    def chosen_where(self, flags: Any, compute: Callable[[], Any], found: Any) -> Any:
        return super().chosen_where(flags, compute, found) if np.any(flags) else found

    def add_examples(self, arrays: Arrays, weighing: Any, mask: Any) -> tuple[list[np.ndarray], np.ndarray] | None:
        known = arrays if isinstance(arrays, HostArrays) else viewed_arrays(list(arrays))
        return examples.add_examples(known, weighing, mask, self.threads())

    # Results

    def without_nonfinite(self, arrays: Arrays) -> Arrays:
        return OnlyFinite(list(arrays))

    def shrink(self, arrays: Arrays, coefficient: Any, scope: Scope) -> list[HostArray]:
        if isinstance(arrays, OnlyFinite):
            return self._shrunk_finite(arrays, coefficient, scope)
        if not scope.whole:
            return self._shrunk_copies(self._filled_copies(arrays), coefficient, scope)
        if coefficient.keep:
            return self.copies(arrays)
        results, targets = self.places_for(arrays)
        known, others = split(arrays)
        if known and not others and targets:
            self._scale_known(known, targets, coefficient)
            return results
        return self._shrunk_copies(self._filled_copies(arrays), coefficient, scope)

    def _shrunk_copies(self, copies: list[HostArray], coefficient: Any, scope: Scope) -> list[HostArray]:
        self.shrink_(viewed_arrays(copies), coefficient, scope)
        return copies

    def _filled_copies(self, arrays: Arrays) -> list[HostArray]:
        """Return arrays as results are, with the elements of these."""
        results = [self.empty_like(x) for x in arrays]
        for x, y in zip(arrays, results, strict=True):
            y.data[...] = x.data
        return results

    def places_for(self, arrays: Arrays) -> tuple[list[Any], Any]:
        """Return new arrays for results, and how the kernels know them: None if not in the order of `arrays`."""
        if arrays and isinstance(arrays.sources[0], np.ndarray):  # without a view of each, which takes long
            sources = arrays.sources
            results: list[Any] = list(map(np.empty_like, sources))
            targets = results
        else:
            sources, results = [x.data for x in arrays], [self.empty_like(x) for x in arrays]
            targets = [x.data for x in results]
        known = native.describe_buffers(list(map(known_to_buffers, targets)))
        same_order = all(x.strides == y.strides for x, y in zip(sources, targets, strict=True))
        return results, known.kernels if same_order and not known.left_out else None

    def _shrunk_finite(self, arrays: OnlyFinite, coefficient: Any, scope: Scope) -> list[HostArray]:
        results = self._filled_copies(arrays)
        for y in results:
            y.put_zeros()
        return self._shrunk_copies(results, coefficient, scope)

    def update(
        self, leaves: Sequence[Any], arrays: Arrays, new: Arrays, coefficient: Any, scope: Scope
    ) -> Sequence[Any]:
        """Scale the gradients `leaves`, which are `arrays`, from `new` on; return them, or others that replace them."""
        if new is arrays and scope.whole and coefficient.keep:
            return leaves
        if (new is arrays and self._all_known(arrays)) or self._all_writable(leaves):
            if new is not arrays:
                for x in arrays:
                    x.put_zeros()
            self.shrink_(arrays, coefficient, scope)
            self.wrote(leaves)
            return leaves
        results = self.shrink(new, coefficient, scope)
        return [self._put(leaf, x, y) for leaf, x, y in zip(leaves, arrays, results, strict=True)]

    def update_clamped(self, leaves: Sequence[Any], arrays: Arrays, bound: float) -> Sequence[Any]:
        """Clamp the gradients `leaves`, which are `arrays`; return them, or others that replace them."""
        if self.can_write(leaves, arrays):
            self.clamp_(arrays, bound)
            self.wrote(leaves)
            return leaves
        results = [x.copy() for x in arrays]
        self.clamp_(viewed_arrays(results), bound)
        return [self._put(leaf, x, y) for leaf, x, y in zip(leaves, arrays, results, strict=True)]

    def _all_known(self, arrays: Arrays) -> bool:
        """Say whether the kernels can write all of the arrays."""
        known, others = split(arrays)
        return self.known_writable and known is not None and not others

    def _put(self, leaf: Any, x: HostArray, result: Any) -> Any:
        """Write a result where the gradient lies, or return another that replaces it."""
        if not self.writable(leaf):
            return self.leave(result, leaf)
        x.data[...] = result.data if isinstance(result, HostArray) else known_to_buffers(result)
        self.wrote([leaf])
        return leaf

    def shrink_(self, arrays: Arrays, coefficient: Any, scope: Scope) -> None:
        """Scale arrays where they are; write nothing if the coefficient keeps them."""
        if not scope.whole:
            for x in arrays:
                self.scale_rows(x, coefficient, scope)
            return
        if coefficient.keep:
            return
        known, others = split(arrays)
        if known:
            self._scale_known(known, known, coefficient)
        for x in others:
            self.scale_chunks(x, coefficient)

    def _scale_known(self, known: Any, to: Any, coefficient: Any) -> None:
        if coefficient.blank:
            to.fill_zero(self.threads())
            return
        pairs = [(f.first, 1.0 if f.second is None else f.second) for f in (coefficient.wide, coefficient.narrow)]
        known.scale(to, *pairs, self.threads())

    def clamped_all(self, prepared: Sequence[Any], leaves: Sequence[Any], bound: float) -> list[Any]:
        with self.precision():
            copies = self.copies(self.enter(prepared))
            if copies:
                self.clamp_(self.entered_copies(copies), bound)
            return self.leave_all(copies, leaves)

    def copies(self, arrays: Arrays) -> list[Any]:
        """Return copies of the arrays, in the same memory orders."""
        return [x.copy() for x in arrays]

    def entered_copies(self, copies: Sequence[Any]) -> HostArrays:
        """Return what `copies` has returned as arrays."""
        return viewed_arrays(copies)

    def clamp_(self, arrays: Arrays, bound: float) -> None:
        """Clamp arrays where they are; write only the chunks in which something changes."""
        known, others = split(arrays)
        if known:
            known.clamp(bound, self.threads())
        for x in others:
            self.clamp_chunks(x, bound)


def sum_dtype(x: Any, wide: Any, dtype: str | None) -> str:
    """Return the dtype in which a sum over examples of `x` is handed out, real or complex as `wide` is."""
    real = dtype or ("float64" if format_of(x).precision == 53 else "float32")
    if "complex" in dtype_name(wide):
        return "complex128" if real == "float64" else "complex64"
    return real


def backend(leaves: Sequence[Any], scalars: Sequence[Any]) -> Host:
    """Return the backend for NumPy arrays."""
    return HOST


HOST = Host()
