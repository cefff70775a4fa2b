"""One number that all elements are multiplied by, with products that are rounded to nearest.

`coefficient` rounds each product toward zero. That takes an accelerator several operations for each array. One
multiplication of all arrays takes one, but it rounds to nearest, perhaps up. So the number is lower here, and the same
bound holds:

1. N is the computed norm, C the threshold, and the exact norm is at most N / (1 - E) + F, as `norms` proves.
2. Where N <= (C - F) * (1 - E), elements are multiplied by 1. That leaves all bits as they are.
3. Otherwise those of a dtype are multiplied by its c = K / N, rounded down, K = (C - A) * (1 - E) * (1 - u) * (1 - v).
4. A product of an element x has at most the magnitude c*|x|*(1 + u), or c*|x| + s/2 below the normal range. Here u is
   the unit roundoff and s the smallest subnormal number of its dtype. Half types are multiplied in float32 first,
   which costs another (1 + 2**-24) and 2**-150.
5. c is rounded to nearest in float32 for all but float64. That costs v = 2**-24 in the normal range. Below it costs
   half a step at most, 2**-150, which is taken off before.
6. By Minkowski's inequality the norm of the results is at most (C - A) + A, where A = F + the sum over dtypes of
   n**(1/p) * (s/2 + 2**-150), for n elements of the dtype and the order p. All terms are rounded so that A is not
   too small and K not too large.

Where A is not small beside C, as with float16 and a tiny threshold, results would be much smaller than they may be.
There is no such number then. What decides it is known before anything is computed: no device is waited for.

A number is chosen for many norms at once where `norm` is a vector.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradclip.backends import Backend
from gradclip.backends.arrays import Arrays
from gradclip.backends.formats import FLOAT32, FLOAT64, Format, format_of, is_complex
from gradclip.backends.protocols import AtOnce

if TYPE_CHECKING:
    from gradclip.core.norms import Norm, Order

_LARGEST = sys.float_info.max
_FLOAT32_ROUNDOFF = FLOAT32.roundoff
_HALF_STEP = FLOAT32.step / 2
# What A may be of the threshold: results may be smaller than they could be by as much.
_SHARE, _SHARE_OF_HALVES = 2.0**-20, 2.0**-9


@dataclass(frozen=True)
class Multiplier:
    """What all elements are multiplied by: 1 where they stay, NaN where all of them become NaN.

    `factors` has a number for each dtype, by its name: a float64 number for float64, a float32 number for all others.
    `blanks` says that products which are NaN become zeros. `at_once` multiplies.
    """

    at_once: AtOnce
    factors: dict[str, Any]
    blanks: bool = False

    def scaled(self, _backend: Backend, arrays: Arrays) -> list[Any]:
        """Return the arrays scaled."""
        return self.at_once.multiplied(arrays, self)

    def update(self, _backend: Backend, leaves: Sequence[Any], arrays: Arrays, new: Arrays) -> Sequence[Any]:
        """Scale the gradients `leaves`, which are `arrays`, from `new` on; return them, or others that replace them."""
        return self.at_once.update(leaves, arrays, new, self)


@dataclass(frozen=True)
class Bounds:
    """Norms up to `limit` stay; else `numerator` / norm, times the share of a dtype, is its number, not rounded yet."""

    limit: float
    numerator: float
    shares: dict[Format, float]


def bounds(arrays: Arrays, order: Order, max_norm: float, error: float, floor: float = 0.0) -> Bounds | None:
    """Return K and the limit of this module's docstring; None where A is not small beside the threshold."""
    # Widest first, whose share is 1.
    formats = sorted(arrays.formats, key=_lost)
    halves = any(element.precision < FLOAT32.precision for element in formats)
    below = (floor + _below_normal(arrays, order)) * (1.0 + 2.0**-50)
    if below > max_norm * (_SHARE_OF_HALVES if halves else _SHARE) and (max_norm > 0 or floor):
        return None
    threshold = min(max_norm, _LARGEST)
    limit = threshold if max_norm > _LARGEST else (threshold - floor) * (1.0 - error) * (1.0 - 2.0**-50)
    least = _lost(formats[0]) if formats else 0.0
    numerator = max(0.0, threshold - below) * (1.0 - error) * (1.0 - least) * (1.0 - 2.0**-49)
    shares = {element: 1.0 if element is formats[0] else 1.0 - _lost(element) for element in formats}
    return Bounds(limit, numerator, shares)


def _lost(element: Format) -> float:
    """Return a bound on what rounding adds to a product, relatively: u, and v where the number is float32."""
    if element is FLOAT64:
        return element.roundoff
    return element.roundoff + _FLOAT32_ROUNDOFF * (2 if element.precision < FLOAT32.precision else 1)


def _below_normal(arrays: Arrays, order: Order) -> float:
    """Return what products below the normal range can add to the norm of all results."""
    counts: dict[Format, int] = {}
    for x in arrays:
        element = format_of(x)
        counts[element] = counts.get(element, 0) + _count(x)
    return sum(count ** (1.0 / order.p) * _half_step(element) for element, count in counts.items() if count)


def _count(x: Any) -> int:
    count = 2 if is_complex(x) else 1
    for length in x.shape:
        count *= length
    return count


def _half_step(element: Format) -> float:
    return element.step / 2 + (_HALF_STEP if element.precision < FLOAT32.precision else 0.0)


def multiplier(
    backend: Backend,
    at_once: AtOnce,
    norm: Norm,
    found: Bounds,
    arrays: Arrays,
    *,
    blanks: bool = False,
    spoils: bool = True,
) -> Multiplier:
    """Return the number that follows from a settled norm.

    Where that is infinite, the number is NaN if it `spoils`, else 0. `blanks` asks for zeros where it would be NaN.
    """
    xp, value = backend.xp, norm.value
    limit: Any = found.limit
    numerator: Any = found.numerator
    if norm.divisor is not None:
        limit, numerator = limit / norm.divisor, numerator / norm.divisor
        numerator = xp.where(numerator < FLOAT64.tiny, 0.0, numerator)
    keep = value <= limit
    # A product with 0 is 0, but NaN for a norm that is infinite, whose quotient would be 0.
    quotient = (numerator - value * 0.0 if spoils else numerator) / value
    if blanks:
        quotient = xp.where(quotient == quotient, quotient, 0.0)
    factors = {}
    for element, share in found.shares.items():
        own = quotient if share == 1.0 else quotient * share
        if element is FLOAT64:
            own = xp.where(own < 2.0**-1021, 0.0, own)
        else:
            # Below zero there is only what float32 reads as zero.
            own = own - _HALF_STEP
        chosen = xp.where(keep, 1.0, own)
        factors[element.name] = chosen if element is FLOAT64 else backend.single(chosen)
    return Multiplier(at_once, factors, blanks)
