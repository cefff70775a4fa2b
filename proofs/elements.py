"""Elements times the coefficient of a norm and a threshold, by every way for host memory, against exact arithmetic.

A quotient q = |x| * C / upper in float64 errs by at most 3 * 2**-53. So a result below q * (1 - 2**-50) is below the
exact product. The few others are compared as fractions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
from claim import Refuted

from gradclip._src import native
from gradclip._src.backends.host.arrays import as_float, multiplied, narrowed
from gradclip._src.core.coefficient import coefficient
from gradclip._src.core.formats import FLOAT64, format_named, product_format
from gradclip._src.core.norms import Norm
from gradclip._src.core.rules import Coefficient

_HOST: Any = SimpleNamespace(xp=np, wide=FLOAT64, concrete=True)
_CERTAIN = 1.0 - 2.0**-50
WAYS = (*(native.kernels.variants() if native.kernels else ()), "numpy")
"""The variants of the kernels, and NumPy."""


def mantissas(rng: random.Random, lowered: float) -> list[float]:
    """Return numbers in [0.5, 1): near the ends, and those that rounding to float32 raises most once lowered."""
    halfway = [(rng.randrange(2**23, 2**24) + 0.5) / 2**24 / lowered for _ in range(6)]
    near = [middle * (1 + rng.choice((-1, 0, 1)) * 2.0 ** -rng.randrange(40, 53)) for middle in halfway]
    ends = [1 - 2.0**-53, 1 - 2.0**-24, 1 - 2.0**-12, 0.5 + 2.0**-53, 0.5 + 2.0**-25, 2 / 3]
    return [one for one in (*near, *ends) if one < 1]


def quotients(rng: random.Random, exponents: range, lowered: float) -> Iterator[tuple[float, float]]:
    """Yield thresholds and upper bounds of norms, whose quotients have these exponents."""
    for exponent in exponents:
        below_a_power = [math.ldexp(1 - share * 2.0**-24, exponent) for share in (0.0625, 0.25, 0.375)]
        for threshold in filter(None, below_a_power):
            # The bound is a float32 number. Times one as large, products are just below a power of two.
            yield threshold, 2.0 - rng.randrange(1, 2**23) * 2.0**-23
        for mantissa in mantissas(rng, lowered):
            upper = rng.choice((1.0, 1.0 + rng.random(), math.ldexp(1.0 + rng.random(), rng.randrange(-60, 60))))
            upper = math.ldexp(upper, 960) if exponent < -900 else upper  # no threshold is small enough otherwise
            threshold = math.ldexp(mantissa * upper, exponent)
            if 0 < threshold < upper:
                yield threshold, upper


def of(threshold: float, upper: float) -> Coefficient:
    """Return the coefficient of an exact norm."""
    return coefficient(_HOST, Norm(np.float64(upper), None, 0.0, 0.0), np.float64(threshold), split=True)


def scaled(x: np.ndarray, dtype: str, chosen: Coefficient, way: str) -> np.ndarray:
    """Return elements times a coefficient; bfloat16 as its bits."""
    wide, narrow = ((float(one.first), float(one.second)) for one in (chosen.wide, chosen.narrow))
    element = format_named(dtype)
    if way == "numpy":
        own = product_format(SimpleNamespace(dtype=element.name), FLOAT64)
        first, second = wide if own is FLOAT64 else map(np.float32, narrow)
        return narrowed(multiplied(x, dtype, own, first, second), element)
    native.kernels.use_variant(way)
    result = np.zeros_like(x)
    given, to = map(native.describe_buffers, ([x], [result]))
    assert not [*given.left_out, *to.left_out]
    given.kernels.scale(to.kernels, wide, narrow, 1)
    return result


def check(x: np.ndarray, dtype: str, threshold: float, upper: float, way: str) -> int:
    """Raise `Refuted` if a result is above the exact product, or has another sign. Return the number of results."""
    y = scaled(x, dtype, of(threshold, upper), way)
    before, after = as_float(x, dtype), as_float(y, dtype)
    if not np.array_equal(np.signbit(before), np.signbit(after)):
        raise Refuted(f"{way} changes a sign: {dtype}, {threshold!r} / {upper!r}")
    sizes, found = np.abs(before), np.abs(after)
    for index in np.flatnonzero(~certain(sizes, found, threshold, upper) & (found != 0)):
        size, result = (Fraction(float(one[index])) for one in (sizes, found))
        if result * Fraction(upper) > size * Fraction(threshold):
            raise Refuted(f"{way}: {dtype} {float(size)!r} * {threshold!r} / {upper!r} became {float(result)!r}")
    return x.size


def certain(sizes: np.ndarray, found: np.ndarray, threshold: float, upper: float) -> np.ndarray:
    """Say of which results float64 shows that they are below the exact product, whatever their exponents."""
    size, exponent = np.frexp(sizes.astype(np.float64))
    above, of_above = math.frexp(threshold)
    below, of_below = math.frexp(upper)
    with np.errstate(under="ignore", over="ignore"):  # a result far below or above stays so
        in_units = np.ldexp(found.astype(np.float64), -(exponent + (of_above - of_below)))
    return in_units < size * above / below * _CERTAIN


def finite(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Return those that are finite."""
    return numbers[np.isfinite(as_float(numbers, dtype))]
