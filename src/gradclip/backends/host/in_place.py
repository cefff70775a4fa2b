"""Arrays in host memory that are changed where they are: by the kernels, those that they do not know chunk by chunk."""

from typing import Any

from gradclip.backends.arrays import Arrays
from gradclip.backends.host import chunkwise
from gradclip.backends.host.arrays import split
from gradclip.backends.protocols import Scope


def scale_(arrays: Arrays, coefficient: Any, scope: Scope, threads: int) -> None:
    """Scale arrays by a coefficient, which has an entry for each norm; write nothing where it keeps them."""
    if not scope.whole:
        for x in arrays:
            chunkwise.scale_rows(x, coefficient, scope)
        return
    if coefficient.keep:
        return
    known, others = split(arrays)
    if known:
        scale_known(known, known, coefficient, threads)
    for x in others:
        chunkwise.scale_chunks(x, coefficient)


def scale_known(known: Any, to: Any, coefficient: Any, threads: int) -> None:
    """Put what the kernels know, scaled, in the places `to`."""
    if coefficient.blank:
        to.fill_zero(threads)
        return
    pairs = [(f.first, 1.0 if f.second is None else f.second) for f in (coefficient.wide, coefficient.narrow)]
    known.scale(to, *pairs, threads)


def clamp_(arrays: Arrays, bound: float, threads: int) -> None:
    """Clamp arrays; write only the chunks in which something changes."""
    known, others = split(arrays)
    if known:
        known.clamp(bound, threads)
    for x in others:
        chunkwise.clamp_chunks(x, bound)
