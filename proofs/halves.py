"""Every float16 and bfloat16 number, times coefficients of all exponents, is at most the exact product."""

from __future__ import annotations

import random
from functools import partial
from itertools import cycle

import numpy as np
from claim import Claim, Loosened
from elements import WAYS, check, finite, quotients

from gradclip._src.core import coefficient
from gradclip._src.core.rules import LOWERED

TIMES = {"float16": 2, "bfloat16": 1}
"""How often each exponent is tried, with other mantissas."""
EXPONENTS = {"float16": range(0, -60, -1), "bfloat16": range(0, -290, -1)}
"""Of the coefficients. Smaller ones make zeros of all."""


def _checked(dtype: str) -> str:
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = finite(bits.view(np.float16) if dtype == "float16" else bits, dtype)
    parts = np.array_split(x, 16)  # which stay in cache
    rng, ways, count = random.Random(7), cycle(WAYS), 0
    for _ in range(TIMES[dtype]):
        for threshold, upper in quotients(rng, EXPONENTS[dtype], LOWERED * coefficient.NARROW_LOWERED):
            way = next(ways)
            count += sum(check(part, dtype, threshold, upper, way) for part in parts)
    return f"{count / 1e6:.0f} million results"


def claims() -> list[Claim]:
    """Return what is claimed of products of half types."""
    more = (Loosened("gradclip._src.core.coefficient.NARROW_LOWERED", 1.0),)
    return [
        Claim(
            f"every {dtype} number is at most its exact product",
            coefficient.__name__,
            "halves.py",
            partial(_checked, dtype),
            more,
        )
        for dtype in EXPONENTS
    ]
