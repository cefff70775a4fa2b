"""In-place changes to host arrays: with the kernels where possible, otherwise chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradclip.backends.host import chunkwise
from gradclip.backends.host.arrays import split
from gradclip.core.arrays import Arrays
from gradclip.core.scopes import Scope

if TYPE_CHECKING:
    from gradclip.core.records import Coefficient, Factors
    from gradclip.native._kernels import Arrays as KernelArrays


def scale_(arrays: Arrays, coefficient: Coefficient, scope: Scope, threads: int) -> None:
    """Scale arrays by a coefficient with an entry for each norm. Elements that it keeps are not written."""
    if not scope.whole:
        for x in () if coefficient.keep.all() else arrays:
            chunkwise.scale_rows(x, coefficient, scope)
        return
    # Gradients that are not clipped are not written: memory access is what takes time.
    if coefficient.keep:
        return
    known, others = split(arrays)
    if known:
        scale_known(known, known, coefficient, threads)
    for x in others:
        chunkwise.scale_chunks(x, coefficient)


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
