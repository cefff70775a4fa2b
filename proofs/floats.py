"""float32 and float64 numbers of every exponent, times coefficients, are at most the exact product."""

from __future__ import annotations

import math
import random
from functools import partial
from itertools import cycle

import numpy as np
from claim import Claim, Loosened
from elements import WAYS, check, quotients

from gradclip._src.core import coefficient
from gradclip._src.core.formats import format_named
from gradclip._src.core.rules import LOWERED

EXPONENTS = {"float32": range(0, -261, -1), "float64": range(0, -2045, -29)}
"""Of the coefficients. Smaller ones make zeros of all."""


def _edges(rng: np.random.Generator, dtype: str, upper: float) -> np.ndarray:
    """Return numbers of every exponent of a dtype, of both signs: the ends of each binade, others, and like `upper`."""
    known = format_named(dtype)
    digits = known.precision
    first = 1 << digits - 1
    each = 16 if dtype == "float32" else 2
    like = round(math.ldexp(math.frexp(upper)[0], digits))
    found = [first, first + 1, 2 * first - 1, 2 * first - 2, like, *rng.integers(first, 2 * first, each).tolist()]
    exponents = np.arange(known.min_exponent - digits - 1, known.max_exponent)
    with np.errstate(under="ignore", over="ignore"):
        x = np.ldexp(np.array(found, np.float64), exponents[:, None] - digits).astype(dtype).reshape(-1)
    x[::2] *= -1
    return x[np.isfinite(x)]


def _checked(dtype: str) -> str:
    rng, ways, count = random.Random(7), cycle(WAYS), 0
    numbers = np.random.default_rng(7)
    lowered = LOWERED * (coefficient.NARROW_LOWERED if dtype == "float32" else 1.0)
    for threshold, upper in quotients(rng, EXPONENTS[dtype], lowered):
        count += check(_edges(numbers, dtype, upper), dtype, threshold, upper, next(ways))
    return f"{count / 1e6:.0f} million results"


def claims() -> list[Claim]:
    """Return what is claimed of products of float32 and float64."""
    more = {"float32": ("NARROW_LOWERED", 1.0 - 1.9 * 2.0**-24), "float64": ("_lowered", lambda backend: 1.0)}
    return [
        Claim(
            f"{dtype} numbers of every exponent are at most their exact product",
            coefficient.__name__,
            "floats.py",
            partial(_checked, dtype),
            (Loosened(f"{coefficient.__name__}.{name}", value),),
        )
        for dtype, (name, value) in more.items()
    ]
