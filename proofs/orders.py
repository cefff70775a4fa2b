"""Sums in a fixed order, of the terms that lose the most in it, err by no more than `backends.sums` states.

A term of u is lost where it is added to 1. So with a 1 at each place in turn, and u elsewhere, a sum is too small by as
many u as there are additions of single terms to that number.
"""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from claim import Claim, Loosened, Refuted

from gradclip._src import native
from gradclip._src.backends import sums
from gradclip._src.backends.portable import Portable
from gradclip._src.backends.sums import halving_sum, kernels_sum_error
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import FLOAT32, FLOAT64
from gradclip._src.core.layouts import TREE

SIZES = (1, 2, 17, 64, 1000, 4096, 70_001, 1 << 20)
SHARE = 1.0
"""The share of the stated error that sums by halves are claimed to stay within."""
_DEVICE: Any = SimpleNamespace(wide=FLOAT32)


def _places(size: int) -> list[int]:
    """Return places at the ends, at those of blocks, and within."""
    powers = {1 << k for k in range(size.bit_length())}
    near = {place + more for place in powers for more in (-1, 0, 1)} | {size - 1, size // 3, 0}
    return sorted(place for place in near if 0 <= place < size)


def _lost(found: float, others: int, term: float) -> Fraction:
    """Return the relative error of a sum of 1 and equal terms."""
    exact = 1 + others * Fraction(term)
    return abs(Fraction(found) / exact - 1)


def _worst(errors: list[Fraction], stated: float, unit: float, size: int) -> Fraction:
    worst = max(errors)
    if worst > Fraction(stated):
        raise Refuted(f"a sum of {size} terms errs by {float(worst) / unit:.2f} u, stated: {stated / unit:.2f}")
    return worst / Fraction(unit)


def _kernels() -> str:
    most, unit = Fraction(0), FLOAT64.roundoff
    for size, variant in itertools.product(SIZES, native.kernels.variants()):
        native.kernels.use_variant(variant)
        for p in (1.0, 2.0):
            x = np.full(size, unit ** (1 / p) if p == 1 else 2.0**-27)  # a square of 2**-54 is lost in the same way
            table, errors = native.describe_buffers([x]).kernels, []
            for place in _places(size):
                before, x[place] = x[place], 1.0
                errors.append(_lost(table.sum(p, 1.0, False, 1)[0], size - 1, before**p))
                x[place] = before
            most = max(most, _worst(errors, kernels_sum_error(size, False, p), unit, size))
    return f"{float(most):.1f} u of {native.ADDITIONS}"


def _halves() -> str:
    most, unit = Fraction(0), FLOAT32.roundoff
    for size in SIZES[:-1]:
        errors = []
        for place in _places(size):
            # One term in each sum that meets the 1.
            others = [place ^ 1 << k for k in range(size.bit_length()) if place ^ 1 << k < size]
            x = np.zeros(size, np.float32)
            x[others], x[place] = unit, 1.0
            errors.append(_lost(float(halving_sum(np, x, (0,))), len(others), unit))
        stated = Portable.sum_error(_DEVICE, size, Arrays([]), 1.0, TREE)
        most = max(most, _worst(errors, SHARE * stated, unit, size))
    return f"{float(most):.1f} u"


def claims() -> list[Claim]:
    """Return what is claimed of orders of additions."""
    fewer, half = Loosened("gradclip._src.native.ADDITIONS", 63), Loosened("orders.SHARE", 0.4)
    claim = partial(Claim, module=sums.__name__, script="orders.py")
    return [
        claim("sums of the kernels", check=_kernels, loosened=(fewer,)),
        claim("sums by halves", check=_halves, loosened=(half,)),
    ]
