"""Arrays in host memory that are changed where they are: by the kernels, those that they do not know chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradclip.backends.arrays import Arrays
from gradclip.backends.host import chunkwise
from gradclip.backends.host.arrays import split
from gradclip.backends.values import Scope

if TYPE_CHECKING:
    from gradclip.core.coefficient import Coefficient, Factors
    from gradclip.native._kernels import Arrays as KernelArrays


def scale_(arrays: Arrays, coefficient: Coefficient, scope: Scope, threads: int) -> None:
    """Scale arrays by a coefficient, which has an entry for each norm; write nothing where it keeps them."""
    if not scope.whole:
        for x in () if coefficient.keep.all() else arrays:
            chunkwise.scale_rows(x, coefficient, scope)
        return
    # A gradient that is not clipped is not even written: memory is what takes the time.
    if coefficient.keep:
        return
    known, others = split(arrays)
    if known:
        scale_known(known, known, coefficient, threads)
    for x in others:
        chunkwise.scale_chunks(x, coefficient)


def scale_known(known: KernelArrays, to: KernelArrays, coefficient: Coefficient, threads: int) -> None:
    """Put what the kernels know, scaled, in the places `to`."""
    if coefficient.blank:
        to.fill_zero(threads)
        return
    known.scale(to, _pair(coefficient.wide), _pair(coefficient.narrow), threads)


def _pair(factors: Factors) -> tuple[float, float]:
    return factors.first, 1.0 if factors.second is None else factors.second


def clamp_(arrays: Arrays, bound: float, threads: int) -> None:
    """Clamp arrays; write only the chunks in which something changes."""
    known, others = split(arrays)
    if known:
        known.clamp(bound, threads)
    for x in others:
        chunkwise.clamp_chunks(x, bound)
