"""Norms: their orders, and the proof of their error.

The norm of order p of a tree is that of all its elements as one vector: (sum |x|**p)**(1/p), the largest magnitude for
`inf`, the smallest for `-inf`. It is computed in three steps: a sum for each array (or shard, or file), their
combination, and the root. Sums run in float64 if the device has it. If the powers of a dtype cannot leave that range,
its elements are summed directly. Otherwise the magnitudes are first divided by the largest one, unless the sum shows
that nothing was lost.

The error. Let u be the unit roundoff of the format summed in, and N the exact norm. The error d of a computed norm m
says that m * (1 - d) <= N <= m / (1 - d). Take a sum of non-negative terms, none of which takes part in more than k
additions. Each addition multiplies it by at least 1 - u and at most 1 + u. So the sum is at least (1 - u)**k >= 1 - k*u
times the exact one, by Bernoulli's inequality, and at most 1 / (1 - k*u) times, since (1 + u) * (1 - u) < 1. There is
no term in u**2, however many terms there are (Jeannerod and Rump, "Improved error bounds for inner products in
floating-point arithmetic", 2013, prove this of sums with any signs). The kernels for host memory, and devices that sum
in float32, add so that k is small; elsewhere k is the number of terms. Squares of half types that stay in float32's
range are exact in it, and the kernels add four at a time in float32, which adds 2**-22 to the error. Each term carries
at most the errors of a division, a multiplication and a magnitude.

- For p = 1, d is less than (k + 8)*u, stated as (k + 16)*u.
- For p = 2, the root halves the error: with x = (k + 3)*u <= 1, sqrt(1 - x) is at least 1 - x/2 - x**2/2. So d is less
  than x/2 + x**2 + 2u, stated as s/2 + s**2 + 16u with s = k*u: sums in other units are rounded once more, and on some
  devices roots err by more than one rounding (proofs/reals.py).
- For other p, the power adds the error in `_POW_ERROR`.

The largest and smallest magnitude of real numbers are exact. That of a complex number may be rounded to a multiple of
the smallest step; if that matters, the norm's `floor` accounts for it.

Complex numbers with finite parts may have a magnitude beyond the range. If the norm of complex128 numbers is not
finite, but that of their quarters is, the norm is 4 times the latter. A quarter loses less than two steps. Compared
with so large a norm this is nothing; for the smallest magnitude, it is part of the `floor`.
"""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np

from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import FLOAT64, Format
from gradclip._src.core.values import Arithmetic, Array
from gradclip._src.words import shown

_POW_ERROR = {53: 2.0**-41, 24: 2.0**-14}


@dataclass(frozen=True)
class Order:
    """The order of a norm: `p` > 0, `inf` or `-inf`. For p < 1 it is not a norm, but clipping by it is defined."""

    p: float
    extreme: bool = field(init=False, repr=False)  # whether it is the largest or smallest magnitude instead of a sum

    def __post_init__(self) -> None:
        object.__setattr__(self, "extreme", self.p in (math.inf, -math.inf))

    @classmethod
    def parse(cls, ord: object, name: str = "ord") -> "Order":
        """Return the order that a user passes: a number >= 1, `inf`, `-inf`, these as strings, or None for 2.

        Raises ValueError for anything else. Its message calls the order `name`.
        """
        if isinstance(ord, Order):
            return ord
        if type(ord) in (float, int) and ord in _USUAL_ORDERS:
            return _USUAL_ORDERS[ord]
        if ord is None:
            return cls(2.0)
        if isinstance(ord, str) and ord in ("inf", "-inf"):
            return cls(float(ord))
        if isinstance(ord, numbers.Real) and not isinstance(ord, bool):
            try:
                p = float(ord)
            except OverflowError:
                p = math.nan
            if p >= 1 or p == -math.inf:
                return cls(p)
        advice = "For the Euclidean norm leave it out."
        if hasattr(ord, "shape") or isinstance(ord, dict | list | tuple):
            advice = "To measure several arrays together, pass them as one list, in the first place."
        raise ValueError(
            f"{name} must be a number >= 1, inf, -inf, 'inf', '-inf' or None (which means 2), got {shown(ord)}. "
            f"{advice}"
        )


EUCLIDEAN = Order(2.0)
_USUAL_ORDERS: dict[object, Order] = {1.0: Order(1.0), 2.0: EUCLIDEAN, math.inf: Order(math.inf)}


@dataclass(frozen=True)
class Norm:
    """A computed norm, `value * divisor`, with a proven relative `error` plus at most `floor`.

    Or many norms, as vectors; `error` and `floor` may then be one number for all. Those that are not `sure` are not
    finite, or may have lost something to underflow, or have not been computed.
    """

    value: Any
    divisor: Any
    error: float
    floor: float
    sure: Any = True

    def product(self) -> Any:
        """Return the norm as one wide number, inf if it is beyond the range."""
        return self.value if self.divisor is None else self.value * self.divisor


def rooted(xp: ModuleType, total: Any, order: Order) -> Any:
    """Return the norm, given the sum of powers or the extreme magnitude."""
    if order.extreme or order.p == 1:
        return total
    return xp.sqrt(total) if order.p == 2 else total ** (1.0 / order.p)


def of_all(xp: ModuleType, values: Array, order: Order) -> Any:
    """Return the norm of gradients of which each has one of these norms, a vector with at least one entry."""
    if order.extreme:
        return xp.max(values) if order.p > 0 else xp.min(values)
    largest = xp.max(values)
    unit = xp.where((largest > 0) & xp.isfinite(largest), largest, 1.0)
    return rooted(xp, xp.sum((values / unit) ** order.p), order) * unit


def of_numbers(norms: Sequence[float], order: Order) -> float:
    """Return the same for plain numbers, of which there may be none."""
    if order.extreme:
        return (max if order.p > 0 else min)(norms, default=0.0)
    largest = max(norms, default=0.0)
    if order.p == 2 or not 0 < largest < math.inf:
        return math.hypot(*norms)
    return sum((norm / largest) ** order.p for norm in norms) ** (1.0 / order.p) * largest


def stacked(backend: Arithmetic, norms: Sequence[Norm]) -> Norm:
    """Return several norms as one vector."""
    values = [norm.value for norm in norms]
    divisor = stacked_divisors(backend, values, [norm.divisor for norm in norms])
    errors, floors = [norm.error for norm in norms], [norm.floor for norm in norms]
    return Norm(backend.stacked(values), divisor, one_or_each(backend, errors), one_or_each(backend, floors))


def stacked_divisors(backend: Arithmetic, values: Sequence[Any], divisors: Sequence[Any]) -> Any:
    """Return the divisors of norms with these values as one vector, None if all are 1."""
    if all(divisor is None for divisor in divisors):
        return None
    pairs = zip(values, divisors, strict=True)
    return backend.stacked([backend.xp.ones_like(value) if divisor is None else divisor for value, divisor in pairs])


def one_or_each(backend: Arithmetic, numbers: Sequence[Any]) -> Any:
    """Return one number if all are the same, else a vector."""
    if all(isinstance(number, float) for number in numbers):
        return numbers[0] if len(set(numbers)) == 1 else backend.scalar(np.array(numbers), ())
    return backend.xp.stack([backend.scalar(number, ()) for number in numbers])


def relative_error(order: Order, sum_error: float, wide: Format, *, exact: bool) -> float:
    """Return a proven bound on the relative error of a norm, given that of the additions in its sum."""
    if exact:
        return 0.0
    if order.p == 2:
        return sum_error * (sum_error + 0.5) + 16 * wide.roundoff
    sum_error += 16 * wide.roundoff
    if order.p != 1 and not order.extreme:
        sum_error += _POW_ERROR[wide.precision]
    return sum_error * max(1.0, 1.0 / order.p if order.p > 0 else 1.0)


def norm_dtype(arrays: Arrays) -> str:
    """Return the dtype of a returned norm: float64 if an array has that precision, else float32."""
    return "float64" if FLOAT64 in arrays.formats else "float32"


def settled(backend: Arithmetic, norm: Norm) -> Norm:
    """Return the norm with a power of two as divisor, 1 for ordinary norms, and a value well inside the range."""
    if norm.divisor is None:
        return norm
    xp, digits = backend.xp, backend.wide.max_exponent  # 1024, or 128
    one = xp.ones_like(norm.divisor)
    big, small = norm.divisor > 2.0 ** (digits * 3 // 8), norm.divisor < 2.0 ** -(digits * 3 // 8)
    large, little = 2.0 ** (digits // 2), 2.0 ** -(digits // 8)
    unit = xp.where(big, one * large, xp.where(small, one * little, one))
    inverse = xp.where(big, one / large, xp.where(small, one / little, one))
    return replace(norm, value=norm.value * (norm.divisor * inverse), divisor=unit)
