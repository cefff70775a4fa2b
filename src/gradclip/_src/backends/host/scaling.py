"""Scale arrays in host memory: into new memory or in place, for any layout, with the kernels where they can."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from gradclip._src import native
from gradclip._src.backends.host import chunkwise
from gradclip._src.backends.host.arrays import HostArray, HostArrays, OnlyFinite, known_to_buffers, split, viewed_arrays
from gradclip._src.backends.host.in_host_memory import DTYPES, InHostMemory
from gradclip._src.backends.host.laid import forget_copies, laid, scale_parts, table_of
from gradclip._src.backends.portable import Portable
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.layouts import Groups, Layout, Rows, Several
from gradclip._src.core.norms import Norm, Order
from gradclip._src.core.records import Into

if TYPE_CHECKING:
    from gradclip._src.core.records import Coefficient, Factors
    from gradclip._src.native._kernels import Arrays as KernelArrays

_is_writeable = attrgetter("flags.writeable")


class Scaling(InHostMemory, Portable):
    """The methods that scale."""

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


def scale_(arrays: Arrays, coefficient: Coefficient, layout: Layout, threads: int) -> None:
    """Scale arrays by a coefficient with an entry for each norm. Elements that it keeps are not written."""
    if isinstance(layout, Groups | Rows):
        scale_parts(arrays, coefficient, layout, threads, scale_)
        return
    if not layout.whole:
        for x in () if coefficient.keep.all() else arrays:
            chunkwise.scale_rows(x, coefficient, layout)
        return
    # Gradients that are not clipped are not written: memory access is what takes time.
    if coefficient.keep:
        return
    known, others = split(arrays)
    if known:
        scale_known(known, known, coefficient, threads)
    for x in others:
        chunkwise.scale_chunks(x, coefficient)


def indices_written(arrays: Arrays, new: Arrays, coefficient: Coefficient, layout: Layout) -> Sequence[int]:
    """Return the indices of the arrays that change: of those not kept whole, and of those with elements to set to zero.

    `new` is a view of the arrays without non-finite elements, or the arrays themselves.
    """
    changed = _indices_scaled(coefficient, layout, len(arrays))
    if new is arrays or len(changed) == len(arrays):
        return changed
    kept = set(range(len(arrays))).difference(changed)
    return sorted([*changed, *(index for index in kept if any(chunkwise.count_nonfinite(arrays[index])))])


def _indices_scaled(coefficient: Coefficient, layout: Layout, count: int) -> Sequence[int]:
    if isinstance(layout, Groups | Rows):
        return [index for number in layout.parts_of(~coefficient.keep) for index in layout.part(number).indices]
    return () if np.all(coefficient.keep) else range(count)


def scale_known(known: KernelArrays, to: KernelArrays, coefficient: Coefficient, threads: int) -> None:
    """Write the kernels' arrays, scaled, to the arrays `to`."""
    if coefficient.blank:
        to.fill_zero(threads)
        return
    known.scale(to, _pair(coefficient.wide), _pair(coefficient.narrow), threads)


def _pair(factors: Factors) -> tuple[float, float]:
    return factors.first, 1.0 if factors.second is None else factors.second


def clamp_(arrays: Arrays, bound: float, threads: int) -> None:
    """Clamp arrays in place. Writes only chunks that change."""
    known, others = split(arrays)
    if known:
        known.clamp(bound, threads)
    for x in others:
        chunkwise.clamp_chunks(x, bound)
