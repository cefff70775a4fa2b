"""One number that all elements are multiplied by, with products that are rounded to nearest.

`coefficient` rounds each product toward zero. That takes an accelerator several operations for each array. One
multiplication of all arrays takes one, but it rounds to nearest, perhaps up. So the number is lower here, and the same
bound holds, for orders from 1:

1. N is the computed norm, C the threshold. The exact norm is at most N / (1 - E) + F, as `norms` proves.
2. Where N <= (C - F) * (1 - E), elements are multiplied by 1. That leaves all bits as they are.
3. Otherwise those of a dtype are multiplied by c = K / N, rounded down, with K = (C - A) * (1 - E) * (1 - u) * (1 - v).
   c is at most 1, so that c times the exact norm is at most (C - A + F) * (1 - u) * (1 - v).
4. A product of an element x has at most the magnitude c*|x|*(1 + u), or c*|x| + s/2 below the normal range. Here u is
   the unit roundoff and s the smallest subnormal number of its dtype. Half types are multiplied in float32 first,
   which costs another (1 + 2**-24) and 2**-150. Each dtype has a share of K, which counts its own u and v.
5. c is rounded to nearest in float32 for all but float64. That costs v = 2**-24 in the normal range. Below it costs
   half a step at most, 2**-150, which is taken off before.
6. By Minkowski's inequality the norm of the results is at most (C - A) + A, where A = F + the sum over dtypes of
   n**(1/p) * (s/2 + 2**-150), for n elements of the dtype and the order p. For the order -inf it is at most what the
   smallest element becomes. K is lowered by 2**-49 more, for all roundings in float64, of which there are less than 16.

A norm may come in units of a power of two, its divisor. K and the limit are divided by it, exactly, since K is not
that small: for float64 the threshold is at least 2**-500.

float16 has a large s, so that its part of A may be all of C. Where it is not small, its products are `stepped`: each of
them, y, is moved toward zero by s, or to zero where |y| < s. Where |y| <= 2**-13 that is exact, and
|y| <= c*|x|*(1 + 2**-24) + s/2, so that the result is at most c*|x|. A larger y becomes no larger. So float16 adds
nothing to A. The same holds where y has not been rounded to float16 before.

Where A is still not small beside C, results would be much smaller than they may be. Then arrays are scaled one by one,
by `coefficient`. What decides it is known before anything is computed: no device is waited for. Where N is beyond
2**126 * C, c has few digits in float32, or is zero, and so are the results; for float64 c is zero beyond 2**1021 * C.

A threshold that lies on a device decides nothing here. float16 is always stepped then, and C - A is at least 0. For
float64 all results are zeros where C is below 2**-900, or K, in units of the divisor, below 2**-960; where the norm has
a floor F, for all dtypes, where C is below 2**20 * F.

A device without float64 has c in float32. With u the unit roundoff of that arithmetic, K is lowered by 16*u, the limit
by 8*u (2**-49 and 2**-50 for float64), and c is zero below the normal range.

Many norms at once have as many numbers: `norm`, and what the threshold gives, are vectors then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gradclip.backends import Backend
from gradclip.backends.arrays import Arrays
from gradclip.backends.formats import FLOAT16, FLOAT32, FLOAT64, Format
from gradclip.backends.values import Array, AtOnce

if TYPE_CHECKING:
    from gradclip.core.norms import Norm, Order

_FLOAT32_ROUNDOFF = FLOAT32.roundoff
_HALF_STEP = FLOAT32.step / 2
# What A may be of the threshold: results may be smaller than they could be by as much.
_SHARE, _SHARE_OF_HALVES = 2.0**-20, 2.0**-9
# What products below the normal range add at most: 2**50 times half a step of bfloat16, and 2**-150.
_ADDED = 2.0**-83
_LEAST_THRESHOLD = _ADDED / _SHARE
# Below that a float64 number, made smaller by some units of its roundoff, might be rounded up again.
_EXACT = 2.0**-960


Elements = Mapping[Format, int]
"""How many elements there are of each dtype, the widest first."""


@dataclass(frozen=True)
class Multiplier:
    """What all elements are multiplied by: 1 where they stay, NaN where all of them become NaN.

    `factors` has a number for each dtype, by its name: a float64 number for float64, a float32 number for all others.
    `blanks` says that products which are NaN become zeros. `steps` is -1 where products of float16 are stepped, 0 where
    they are kept; None where no product is stepped. With `sizes` these are vectors: so many of the arrays have the
    first of their numbers, and so on. `at_once` multiplies.
    """

    at_once: AtOnce
    factors: dict[str, Any]
    blanks: bool = False
    steps: Any = None
    sizes: Sequence[int] | None = None

    def scaled(self, _backend: Backend, arrays: Arrays) -> list[Any]:
        """Return the arrays scaled."""
        return self.at_once.multiplied(arrays, self)

    def update(self, _backend: Backend, leaves: Sequence[Any], arrays: Arrays, new: Arrays) -> Sequence[Any]:
        """Scale the gradients `leaves`, which are `arrays`, from `new` on; return them, or others that replace them."""
        return self.at_once.update(leaves, arrays, new, self)


@dataclass(frozen=True)
class Bounds:
    """Norms up to `limit` keep elements; `numerator` / norm, times the share of its dtype, scales the others.

    `at_zero`: a computed norm of 0 may lie above the limit, because it has a floor.
    """

    limit: Any
    numerator: Any
    shares: dict[Format, float]
    stepped: bool = False
    at_zero: bool = False


def bounds(
    elements: Elements, order: Order, max_norm: float, error: float, floor: float = 0.0, wide: Format = FLOAT64
) -> Bounds | None:
    """Return K and the limit of this module's docstring; None where arrays are to be scaled one by one.

    `elements` says how many there are of each dtype; `wide` is the format that c is computed in.
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
    """Return the same for several norms with thresholds of their own, as vectors; `elements` are those of all."""
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
    """Return the same for a wide threshold that the host does not know, or a vector of them."""
    if backend.wide is not FLOAT64:
        return None
    if FLOAT64 in elements:
        threshold = backend.xp.where(threshold < 2.0**-900, 0.0, threshold)
    limit, numerator = _on_device(backend, threshold, _below_normal(elements, order, floor, stepped=True), error, floor)
    if floor:
        small = threshold < floor / _SHARE
        limit, numerator = (backend.xp.where(small, other, x) for other, x in ((-1.0, limit), (0.0, numerator)))
    return replace(_bounds(elements, limit, numerator, stepped=FLOAT16 in elements), at_zero=floor > 0)


def bounds_of_processes(backend: Backend, elements: Elements, max_norm: Any, error: float | Array) -> Bounds | None:
    """Return the same where several processes hold parts, which must come to the same numbers.

    What the others hold is not known here, but that products below the normal range cannot add more than `_ADDED`: this
    holds for 2**50 elements of any dtype, if float16 is stepped. A threshold that lies on a device makes zeros of all
    where it is less than the least.
    """
    if not isinstance(max_norm, float):
        threshold = backend.scalar(max_norm, ())
        limit, numerator = _on_device(backend, threshold, _ADDED, error)
        numerator = backend.xp.where(threshold < _LEAST_THRESHOLD, 0.0, numerator)
    elif max_norm < _LEAST_THRESHOLD:
        return None
    else:
        limit, numerator = _limit_and_numerator(max_norm, _ADDED, 0.0, error)
    # No dtype goes first, since other processes may hold others.
    shares = {element: 1.0 - _lost(element) for element in elements}
    return Bounds(limit, numerator, shares, FLOAT16 in elements)


def beside_processes(backend: Backend, threshold: Array) -> Array:
    """Return the threshold for arrays that are scaled one by one, where other processes use the number above."""
    lower: Array = backend.xp.where(threshold < _LEAST_THRESHOLD, threshold, threshold + -_ADDED)
    return lower


def _bounds(elements: Elements, limit: Any, numerator: Any, *, stepped: bool) -> Bounds:
    widest = next(iter(elements), FLOAT64)
    # The share of the widest dtype is 1, which saves a multiplication.
    shares = {element: 1.0 if element is widest else 1.0 - _lost(element) for element in elements}
    return Bounds(limit, numerator * (1.0 - _lost(widest)), shares, stepped)


def _in_range(max_norm: float, elements: Elements, wide: Format) -> bool:
    """Say whether K and the limit lie in the normal range of an arithmetic, in any unit."""
    if max_norm in (0.0, math.inf):
        return True
    if wide is FLOAT64:
        return max_norm >= 2.0**-500 or FLOAT64 not in elements
    return 2.0**-60 <= max_norm <= 2.0**100 and FLOAT64 not in elements


def _limit_and_numerator(
    max_norm: float, below: float, floor: float, error: float | Array, wide: Format = FLOAT64
) -> tuple[Any, Any]:
    """Return what norms are kept up to, and K without what the dtypes lose: A is `below`."""
    threshold = min(max_norm, wide.largest)
    exact: Any = -error + 1.0
    unlimited = max_norm > wide.largest
    limit = threshold if unlimited else (threshold - floor) * exact * (1.0 - 8.0 * wide.roundoff)
    return limit, max(0.0, threshold - below) * exact * (1.0 - 16.0 * wide.roundoff)


def _on_device(
    backend: Backend, threshold: Array, below: float, error: float | Array, floor: float = 0.0
) -> tuple[Array, Array]:
    """Return the same for thresholds on a device, of which a negative one is 0."""
    exact: Any = -error + 1.0
    limit = (threshold + -floor if floor else threshold) * (exact * (1.0 - 2.0**-50))
    numerator = (threshold + -below) * (exact * (1.0 - 2.0**-49))
    return backend.xp.clip(limit, 0.0, FLOAT64.largest), backend.xp.clip(numerator, 0.0, math.inf)


def _lost(element: Format) -> float:
    """Return a bound on what rounding adds to a product, relatively: u, and v where the number is float32."""
    if element is FLOAT64:
        return element.roundoff
    return element.roundoff + _FLOAT32_ROUNDOFF * (2 if element.precision < FLOAT32.precision else 1)


def _below_normal(elements: Elements, order: Order, floor: float = 0.0, *, stepped: bool = False) -> float:
    """Return A of this module's docstring; what is stepped adds nothing."""
    added = floor
    for element, count in elements.items():
        if stepped and element is FLOAT16:
            continue
        half_step = element.step / 2 or FLOAT64.step  # half a step of float64 is no float64
        in_float32 = _HALF_STEP if element.precision < FLOAT32.precision else 0.0
        added += count ** (1.0 / order.p) * (half_step + in_float32)
    return added * (1.0 + 2.0**-50)


def multiplier(
    backend: Backend, at_once: AtOnce, norm: Norm, found: Bounds, *, blanks: bool = False, spoils: bool = True
) -> Multiplier:
    """Return the number that follows from a settled norm.

    For an infinite norm the number is NaN if it `spoils`, else 0. With `blanks` results are zeros where it is NaN.
    """
    xp, value = backend.xp, norm.value
    limit, numerator = _in_units_of(norm.divisor, backend, found)
    keep = value <= limit
    if found.at_zero:
        value = xp.where(value == 0, 1.0, value)
    # K / inf would be 0. (K - inf * 0) / inf is NaN.
    quotient = (numerator - value * 0.0 if spoils else numerator) / value
    if blanks:
        quotient = xp.where(quotient == quotient, quotient, 0.0)
    factors = {}
    for element, share in found.shares.items():
        own = quotient if share == 1.0 else quotient * share
        if element is FLOAT64:
            factors[element.name] = xp.where(keep, 1.0, xp.where(own < 2.0**-1021, 0.0, own))
            continue
        lowered = own - _HALF_STEP if backend.wide is FLOAT64 else xp.where(own < FLOAT32.tiny, 0.0, own)
        # What is below zero becomes -0.0 in float32, and then 0.
        factors[element.name] = xp.abs(backend.single(xp.where(keep, 1.0, lowered)))
    return Multiplier(at_once, factors, blanks, xp.where(keep, 0.0, -1.0) if found.stepped else None)


def _in_units_of(divisor: Any, backend: Backend, found: Bounds) -> tuple[Any, Any]:
    """Return the limit and K in units of the divisor of a settled norm."""
    limit, numerator = found.limit, found.numerator
    if divisor is None:
        return limit, numerator
    # The largest number of all stands for no limit, in any unit.
    largest = backend.wide.largest
    if isinstance(limit, float):
        return limit if limit == largest else limit / divisor, numerator / divisor
    below = numerator / divisor
    return backend.xp.where(limit == largest, limit, limit / divisor), backend.xp.where(below < _EXACT, 0.0, below)
