"""Scale arrays in host memory in place, for any layout, with the kernels where they can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gradclip._src.backends.host import chunkwise
from gradclip._src.backends.host.arrays import split
from gradclip._src.backends.host.laid import scale_parts
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.layouts import Groups, Layout, Rows

if TYPE_CHECKING:
    from gradclip._src.core.rules import Coefficient, Factors
    from gradclip._src.native._kernels import Arrays as KernelArrays


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
