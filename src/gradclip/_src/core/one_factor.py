"""One number that multiplies all elements, with products rounded to nearest.

`coefficient` rounds each product toward zero, which takes an accelerator several operations per array. Multiplying all
arrays takes a single operation, but it rounds to nearest, so possibly up. So the number is lowered further here. The
same bound holds, for orders >= 1:

1. N is the computed norm, C the threshold. The exact norm is at most N / (1 - E) + F, as `norms` proves.
2. If N <= (C - F) * (1 - E), elements are multiplied by 1, which leaves all bits unchanged.
3. Otherwise the elements of a dtype are multiplied by c = K / N, rounded down, with
   K = (C - A) * (1 - E) * (1 - u) * (1 - v). Since A >= F, c is at most (1 - u) * (1 - v). So c times the exact norm,
   which is at most K / (1 - E) + c * F, is at most (C - A + F) * (1 - u) * (1 - v).
4. The product of an element x has a magnitude of at most c*|x|*(1 + u), or c*|x| + s/2 below the normal range. Here u
   is the unit roundoff and s the smallest subnormal number of the dtype. Half types are multiplied in float32 first,
   which costs another (1 + 2**-24) and 2**-150. Each dtype has a share of K, which accounts for its own u and v.
5. c is rounded to nearest in float32, except for float64. In the normal range that costs v = 2**-24. Below it, it costs
   at most half a step, 2**-150, which is subtracted first.
6. By Minkowski's inequality, the norm of the results is at most (C - A) + A, where A = F + the sum over dtypes of
   n**(1/p) * (s/2 + 2**-150), for n elements of the dtype and the order p. For the order -inf, the norm is at most the
   result of the smallest element. K is lowered by a further 2**-49 for all roundings in float64, which are fewer than
   16.

bfloat16 may be multiplied by a bfloat16 number f, and the products divided by a bfloat16 number S >= 1, where one of
the two is 1. That step changes no bits, so results are rounded once, as in 4, which holds with f / S in place of c. And
f / S is at most c:

- Where the significand of r, which is 1 / c raised by one unit of bfloat16, is at least 1.5, S is r, rounded down to
  bfloat16. 1 / c is computed within one unit of float32, so S is above 1 / c, by at most one unit: 1 / S is at least
  c * (1 - 0.0053).
- Otherwise f is c, rounded down to bfloat16. Then the significand of c is at least 1.34 or at most 1 + 2**-8, so f is
  at least c * (1 - 0.0059), unless c is subnormal. If c is 0 or 1, so is f.

With u = 2**-8, results have at least 0.9902 of the norm that they could have, but for roundings of products, which are
up and down on random data.

A norm may come in units of a power of two, its divisor. K and the limit are divided by it. This is exact, since K is
large enough: for float64 the threshold is at least 2**-500.

float16 has a large s, so its part of A may be all of C. If that part is not small, float16 products are `stepped`: each
product y is moved toward zero by s, or to zero if |y| < s. For |y| <= 2**-13 this is exact, and
|y| <= c*|x|*(1 + 2**-24) + s/2, so the result is at most c*|x|. A larger y does not grow (proofs/bits.py). So float16
adds nothing to A. The same holds if y has not been rounded to float16 before. In PyTorch, what is stepped to zero is
+0: to keep the sign, half as much again would be read and written.

If A is still not small compared with C, results would be much smaller than necessary. Arrays are then scaled one by
one, by `coefficient`. This decision needs no computed value, so no call waits for a device. If N is beyond 2**126 * C,
c has few digits in float32, or is zero, and so are the results. For float64, c is zero beyond 2**1021 * C.

With a threshold on a device, the host cannot decide any of this. float16 is then always stepped, and C - A is at least
0. For float64, all results are zeros if C is below 2**-900, or if K, in units of the divisor, is below 2**-960. If the
norm has a floor F, results of every dtype are zeros if C is below 2**20 * F.

A device without float64 computes c in float32. With u the unit roundoff of that arithmetic, K and the limit are lowered
by 8*u (2**-49 and 2**-50 for float64), and c is zero below the normal range. 2*u are needed if divisions are rounded
correctly or are products with reciprocals. The rest is for those that are not: in Metal they may be off by 2.5 units in
the last place (Metal Shading Language Specification, accuracy with fast math).

Checked by machine: proofs/one_factor.py; f and S: proofs/frameworks.py.

Many norms at once need one number each: `norm`, and everything that follows from the threshold, are then vectors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gradclip._src.core.formats import FLOAT16, FLOAT32, FLOAT64, Format
from gradclip._src.core.protocols import Backend
from gradclip._src.core.rules import OneFactor
from gradclip._src.core.values import Array

if TYPE_CHECKING:
    from gradclip._src.core.norms import Norm, Order

_FLOAT32_ROUNDOFF = FLOAT32.roundoff
_HALF_STEP = FLOAT32.step / 2
# The largest share of the threshold that A may have; results may be too small by that share.
_SHARE, _SHARE_OF_HALVES = 2.0**-20, 2.0**-9
# The most that products below the normal range add: 2**50 times the sum of half a step of bfloat16 and 2**-150.
_ADDED = 2.0**-83
_LEAST_THRESHOLD = _ADDED / _SHARE
# Below this, lowering a float64 number by some units of its roundoff might be rounded away.
_EXACT = 2.0**-960


Elements = Mapping[Format, int]
"""The number of elements of each dtype, the widest first."""


@dataclass(frozen=True)
class Bounds:
    """Norms up to `limit` keep elements; numerator / norm, times the share of the dtype, scales the others.

    `at_zero`: a computed norm of 0 may exceed the limit, because it has a floor.
    """

    limit: Any
    numerator: Any
    shares: dict[Format, float]
    stepped: bool = False
    at_zero: bool = False


def bounds(
    elements: Elements, order: Order, max_norm: float, error: float, floor: float = 0.0, wide: Format = FLOAT64
) -> Bounds | None:
    """Return K and the limit of this module's docstring; None if arrays must be scaled one by one.

    `elements` gives the number of elements of each dtype; `wide` is the format in which c is computed.
    """
    halves = any(element.precision < FLOAT32.precision for element in elements)
    small = max_norm * (_SHARE_OF_HALVES if halves else _SHARE) if max_norm > 0 or floor else math.inf
    below = _below_normal(elements, order, floor)
    stepped = below > small and FLOAT16 in elements
    if stepped:
        below = _below_normal(elements, order, floor, stepped=True)
    if below > small or not _in_range(max_norm, elements, wide):
        return None
    limit, numerator = _limit_and_numerator(max_norm, below, floor, error, wide)
    return _bounds(elements, limit, numerator, stepped=stepped)


def bounds_of_each(
    backend: Backend, elements: Elements, order: Order, max_norms: Sequence[float], error: float, floor: float
) -> Bounds | None:
    """Return the same for several norms, each with its own threshold, as vectors; `elements` counts all of them."""
    found = [bounds(elements, order, max_norm, error, floor, backend.wide) for max_norm in max_norms]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    limit, numerator = (
        backend.scalar(np.array(numbers), ())
        for numbers in ([one.limit for one in known], [one.numerator for one in known])
    )
    return Bounds(limit, numerator, known[0].shares, any(one.stepped for one in known))


def bounds_on_device(
    backend: Backend, elements: Elements, order: Order, threshold: Array, error: float | Array, floor: float
) -> Bounds | None:
    """Return the same for a wide threshold, or a vector of them, that the host does not know."""
    if backend.wide is not FLOAT64:
        return None
    below, step = _below_normal(elements, order, floor, stepped=True), FLOAT64.step if FLOAT64 in elements else 0.0
    limit, numerator = _on_device(backend, threshold, below, error, floor, step)
    if FLOAT64 in elements:
        # What exceeds so small a threshold becomes zeros. What does not is kept.
        numerator = backend.xp.where(threshold < 2.0**-900, 0.0, numerator)
    if floor:
        small = threshold < floor / _SHARE
        limit, numerator = (backend.xp.where(small, other, x) for other, x in ((-1.0, limit), (0.0, numerator)))
    return replace(_bounds(elements, limit, numerator, stepped=FLOAT16 in elements), at_zero=floor > 0)


def bounds_of_processes(backend: Backend, elements: Elements, max_norm: Any, error: float | Array) -> Bounds | None:
    """Return the same if several processes hold parts; all must compute the same numbers.

    The other processes' parts are unknown here. But their products below the normal range add at most `_ADDED`: this
    holds for 2**50 elements of any dtype, if float16 is stepped. With a threshold on a device, all results are zeros if
    it is less than `_LEAST_THRESHOLD`.
    """
    if not isinstance(max_norm, float):
        threshold = backend.scalar(max_norm, ())
        limit, numerator = _on_device(backend, threshold, _ADDED, error)
        numerator = backend.xp.where(threshold < _LEAST_THRESHOLD, 0.0, numerator)
    elif max_norm < _LEAST_THRESHOLD:
        return None
    else:
        limit, numerator = _limit_and_numerator(max_norm, _ADDED, 0.0, error)
    # No dtype is treated as the widest, since other processes may hold different dtypes.
    shares = {element: 1.0 - _lost(element) for element in elements}
    return Bounds(limit, numerator, shares, FLOAT16 in elements)


def beside_processes(backend: Backend, threshold: Array) -> Array:
    """Return the threshold for arrays scaled one by one, if other processes use the number above."""
    lower: Array = backend.xp.where(threshold < _LEAST_THRESHOLD, threshold, threshold + -_ADDED)
    return lower


def _bounds(elements: Elements, limit: Any, numerator: Any, *, stepped: bool) -> Bounds:
    widest = next(iter(elements), FLOAT64)
    # The share of the widest dtype is 1, which saves a multiplication.
    shares = {element: 1.0 if element is widest else 1.0 - _lost(element) for element in elements}
    return Bounds(limit, numerator * (1.0 - _lost(widest)), shares, stepped)


def _in_range(max_norm: float, elements: Elements, wide: Format) -> bool:
    """Return whether K and the limit are in the normal range of the arithmetic, in any unit."""
    if max_norm in (0.0, math.inf):
        return True
    if wide is FLOAT64:
        return max_norm >= 2.0**-500 or FLOAT64 not in elements
    return 2.0**-60 <= max_norm <= 2.0**100 and FLOAT64 not in elements


def _limit_and_numerator(
    max_norm: float, below: float, floor: float, error: float | Array, wide: Format = FLOAT64
) -> tuple[Any, Any]:
    """Return the largest norm that keeps elements, and K before the losses of the dtypes; `below` is A."""
    threshold = min(max_norm, wide.largest)
    exact: Any = -error + 1.0
    unlimited = max_norm > wide.largest
    limit = threshold if unlimited else (threshold - floor) * exact * (1.0 - 8.0 * wide.roundoff)
    steps = 16.0 if wide is FLOAT64 else 8.0
    return limit, max(0.0, threshold - below) * exact * (1.0 - steps * wide.roundoff)


def _on_device(
    backend: Backend, threshold: Array, below: float, error: float | Array, floor: float = 0.0, step: float = 0.0
) -> tuple[Array, Array]:
    """Return the same for thresholds on a device; a negative one counts as 0. `step` covers rounding to subnormals."""
    exact: Any = -error + 1.0
    limit = (threshold + -floor if floor else threshold) * (exact * (1.0 - 2.0**-50))
    limit = limit + -step if step else limit
    numerator = (threshold + -below) * (exact * (1.0 - 2.0**-49))
    return backend.xp.clip(limit, 0.0, FLOAT64.largest), backend.xp.clip(numerator, 0.0, math.inf)


def _lost(element: Format) -> float:
    """Return a relative bound on what rounding adds to a product: u, and v if the number is float32."""
    if element is FLOAT64:
        return element.roundoff
    return element.roundoff + _FLOAT32_ROUNDOFF * (2 if element.precision < FLOAT32.precision else 1)


def _below_normal(elements: Elements, order: Order, floor: float = 0.0, *, stepped: bool = False) -> float:
    """Return A of this module's docstring; stepped dtypes add nothing."""
    added = floor
    for element, count in elements.items():
        if stepped and element is FLOAT16:
            continue
        half_step = element.step / 2 or FLOAT64.step  # half a step of float64 does not fit float64
        in_float32 = _HALF_STEP if element.precision < FLOAT32.precision else 0.0
        added += count ** (1.0 / order.p) * (half_step + in_float32)
    return added * (1.0 + 2.0**-50)


def factor_of(backend: Backend, norm: Norm, found: Bounds, *, blanks: bool = False, spoils: bool = True) -> OneFactor:
    """Return the number that follows from a settled norm.

    For an infinite norm it is NaN if it `spoils`, else 0. With `blanks`, results are zeros if it is NaN.
    """
    xp, value = backend.xp, norm.value
    limit, numerator = _in_units_of(norm.divisor, backend, found)
    keep = value <= limit
    if found.at_zero:
        value = xp.where(value == 0, 1.0, value)
    # K / inf would be 0. (K - inf * 0) / inf is NaN.
    quotient = (numerator - value * 0.0 if spoils else numerator) / value
    alive = quotient == quotient if blanks else None
    if blanks:
        quotient = xp.where(alive, quotient, 0.0)
    factors = {}
    for element, share in found.shares.items():
        own = quotient if share == 1.0 else quotient * share
        if element is FLOAT64:
            factors[element.name] = xp.where(keep, 1.0, xp.where(own < 2.0**-1021, 0.0, own))
            continue
        lowered = own - _HALF_STEP if backend.wide is FLOAT64 else xp.where(own < FLOAT32.tiny, 0.0, own)
        # Numbers below zero become -0.0 in float32, then 0.
        factors[element.name] = xp.abs(xp.astype(xp.where(keep, 1.0, lowered), xp.float32))
    steps = xp.where(keep, 0.0, -1.0) if found.stepped else None
    return OneFactor(factors, alive, steps)


def _in_units_of(divisor: Any, backend: Backend, found: Bounds) -> tuple[Any, Any]:
    """Return the limit and K in units of the divisor of a settled norm."""
    limit, numerator = found.limit, found.numerator
    if divisor is None:
        return limit, numerator
    # The largest number stands for no limit, in any unit.
    largest = backend.wide.largest
    if isinstance(limit, float):
        return limit if limit == largest else limit / divisor, numerator / divisor
    below = numerator / divisor
    return backend.xp.where(limit == largest, limit, limit / divisor), backend.xp.where(below < _EXACT, 0.0, below)
