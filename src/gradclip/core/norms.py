"""Norms: their orders, the partial norm of one array, and how partial norms combine.

The norm of order p of a tree is that of all its elements as one vector: (sum |x|**p)**(1/p), the largest magnitude for
`inf`, the smallest for `-inf`. It is computed in three steps: a `Partial` for each array (or shard, or file), their
combination, and the root. Sums run in float64 if the device has it. If the powers of a dtype cannot leave that range,
its elements are summed directly. Otherwise the magnitudes are first divided by the largest one, unless the sum shows
that nothing was lost.

The error. Let u be the unit roundoff of the format summed in. A sum of non-negative terms, none of which takes part in
more than k additions, has a relative error of at most k*u/(1 - k*u) (Higham, Accuracy and Stability of Numerical
Algorithms, 2nd ed., section 4.2). The kernels for host memory, and devices that sum in float32, add so that k is small;
elsewhere k is the number of terms. Squares of half types that stay in float32's range are exact in it, and the kernels
add four at a time in float32, which adds 2**-22 to the error. Each term carries at most the errors of a division and a
multiplication. The root, by its derivative, divides the relative error by p and adds its own rounding. The total is
less than (k + 8)*u for p = 1 and 2, stated as (k + 16)*u. For other p, the power adds the error in `_POW_ERROR`. The
largest and smallest magnitude of real numbers are exact. That of a complex number may be rounded to a multiple of the
smallest step; if that matters, the norm's `floor` accounts for it.

Complex numbers with finite parts may have a magnitude beyond the range. If the norm of complex128 numbers is not
finite, but that of their quarters is, the norm is 4 times the latter. A quarter loses less than two steps. Compared
with so large a norm this is nothing; for the smallest magnitude, it is part of the `floor`.
"""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial as partial_of
from typing import Any

import numpy as np

from gradclip.core.arrays import Arrays
from gradclip.core.formats import FLOAT64, Format, format_of
from gradclip.core.protocols import Backend
from gradclip.core.scopes import LAYER, TREE, Scope
from gradclip.core.values import Array

_POW_ERROR = {53: 2.0**-41, 24: 2.0**-14}


@dataclass(frozen=True)
class Order:
    """The order of a norm: `p` > 0, `inf` or `-inf`. For p < 1 it is not a norm, but clipping by it is defined."""

    p: float
    extreme: bool = field(init=False, repr=False)  # whether it is the largest or smallest magnitude instead of a sum

    def __post_init__(self) -> None:
        object.__setattr__(self, "extreme", self.p in (math.inf, -math.inf))

    @classmethod
    def parse(cls, ord: object) -> "Order":
        """Return the order that a user passes: a number >= 1, `inf`, `-inf`, these as strings, or None for 2.

        Raises ValueError for anything else.
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
        raise ValueError(
            f"ord must be a number >= 1, inf, -inf, 'inf', '-inf' or None (which means 2), got {ord!r:.80}. "
            "For the Euclidean norm leave it out."
        )


EUCLIDEAN = Order(2.0)
_USUAL_ORDERS: dict[object, Order] = {1.0: Order(1.0), 2.0: EUCLIDEAN, math.inf: Order(math.inf)}


@dataclass(frozen=True)
class Partial:
    """The contribution of one array, shard or file to a norm.

    `total` is the sum of (|x| / divisor)**p, or the extreme magnitude; a `divisor` of None is 1.
    """

    total: Any
    divisor: Any


@dataclass(frozen=True)
class Norm:
    """A computed norm, `value * divisor`, with a proven relative `error` plus at most `floor`.

    Or many norms, as vectors; `error` and `floor` may then be one number for all.
    """

    value: Any
    divisor: Any
    error: float
    floor: float

    def product(self) -> Any:
        """Return the norm as one wide number, inf if it is beyond the range."""
        return self.value if self.divisor is None else self.value * self.divisor


def partial(backend: Backend, arrays: Arrays, order: Order, scope: Scope) -> Partial:
    """Return the contribution of `arrays`, not all of them empty, to their norm, or to each norm of the scope."""
    if order.extreme:
        extreme = backend.largest if order.p > 0 else backend.smallest
        return Partial(extreme(arrays, scope), None)
    for element in arrays.formats:
        if not element.power_fits(order.p, backend.wide):
            return Partial(*backend.scaled_power_sum(arrays, order.p, scope))
    return Partial(backend.power_sum(arrays, order.p, scope), None)


def combine(backend: Backend, partials: Sequence[Partial], order: Order) -> Partial:
    """Return the combined contribution of several arrays."""
    xp = backend.xp
    totals = backend.gather([part.total for part in partials])
    if order.extreme:
        reduce = xp.max if order.p > 0 else xp.min
        return Partial(reduce(xp.stack(totals), axis=0), None)
    if all(part.divisor is None for part in partials):
        return Partial(backend.total(totals), None)
    one = xp.ones_like(totals[0])
    divisors = backend.gather([one if p.divisor is None else p.divisor for p in partials])
    weighed = [xp.where(t > 0, d, 0.0) for t, d in zip(totals, divisors, strict=True)]
    common = xp.max(xp.stack(weighed), axis=0)
    common = xp.where(common > 0, common, 1.0)
    rescaled = [
        xp.where(total > 0, total * (divisor / common) ** order.p, total)
        for total, divisor in zip(totals, divisors, strict=True)
    ]
    return Partial(backend.total(rescaled), common)


def rooted(backend: Backend, whole: Partial, order: Order) -> Any:
    """Return the norm of a combined partial, in units of its divisor."""
    if order.extreme or order.p == 1:
        return whole.total
    return backend.xp.sqrt(whole.total) if order.p == 2 else whole.total ** (1.0 / order.p)


def measure(backend: Backend, arrays: Arrays, order: Order, scope: Scope = TREE) -> Norm:
    """Return the norm of all `arrays` together, or each norm of the scope."""
    count = arrays.sharing(scope)
    if not count:
        shape = () if scope.whole else scope.norms_shape(arrays[0].shape)
        return Norm(backend.zeros(shape, arrays), None, 0.0, 0.0)

    value, divisor = backend.with_care(partial_of(_computed, arrays, order, scope), arrays, count)
    if "complex128" in arrays.dtypes:
        value, divisor = _beyond_range(backend, arrays, order, scope, value, divisor)
    error = _error(backend, arrays, order, count, scope)
    return Norm(value, divisor, error, floor_of(backend, arrays, count, order))


def measure_each(backend: Backend, groups: Sequence[Arrays], order: Order) -> Norm:
    """Return the norms of groups of arrays, as a vector with one norm per group."""
    counts = [group.elements() for group in groups]
    everything = Arrays([x for group in groups for x in group])
    found = backend.norms_of(everything, order.p) if len(everything) == len(groups) else None
    if found is not None:
        error = max(_error(backend, group, order, n, LAYER) for group, n in zip(groups, counts, strict=True))
        return Norm(*found, error, floor_of(backend, everything, max(counts), order))

    def compute(careful: Backend) -> tuple[Any, Any]:
        found = [
            _in_range(careful, group, order) if count else (backend.zeros((), group), None)
            for group, count in zip(groups, counts, strict=True)
        ]
        values, divisors = zip(*found, strict=True)
        return backend.stacked(values), _stacked_divisors(backend, values, divisors)

    value, divisor = backend.with_care(compute, everything, max(counts))
    known = list(zip(groups, counts, strict=True))
    errors = [_error(backend, group, order, count, LAYER) if count else 0.0 for group, count in known]
    floors = [floor_of(backend, group, count, order) if count else 0.0 for group, count in known]
    return Norm(value, divisor, _one_or_each(backend, errors), _one_or_each(backend, floors))


def stacked(backend: Backend, norms: Sequence[Norm]) -> Norm:
    """Return several norms as one vector."""
    values = [norm.value for norm in norms]
    divisor = _stacked_divisors(backend, values, [norm.divisor for norm in norms])
    errors, floors = [norm.error for norm in norms], [norm.floor for norm in norms]
    return Norm(backend.stacked(values), divisor, _one_or_each(backend, errors), _one_or_each(backend, floors))


def _in_range(backend: Backend, arrays: Arrays, order: Order) -> tuple[Any, Any]:
    found = _computed(arrays, order, LAYER, backend)
    return _beyond_range(backend, arrays, order, LAYER, *found) if "complex128" in arrays.dtypes else found


def _error(backend: Backend, arrays: Arrays, order: Order, count: int, scope: Scope) -> float:
    exact = order.extreme and not arrays.any_complex
    sum_error = backend.sum_error(count, arrays, order.p, scope)
    return relative_error(order, sum_error, backend.wide, exact=exact)


def _stacked_divisors(backend: Backend, values: Sequence[Any], divisors: Sequence[Any]) -> Any:
    if all(divisor is None for divisor in divisors):
        return None
    pairs = zip(values, divisors, strict=True)
    return backend.stacked([backend.xp.ones_like(value) if divisor is None else divisor for value, divisor in pairs])


def _one_or_each(backend: Backend, numbers: Sequence[Any]) -> Any:
    """Return one number if all are the same, else a vector."""
    if all(isinstance(number, float) for number in numbers):
        return numbers[0] if len(set(numbers)) == 1 else backend.scalar(np.array(numbers), ())
    return backend.xp.stack([backend.scalar(number, ()) for number in numbers])


def _computed(arrays: Arrays, order: Order, scope: Scope, backend: Backend) -> tuple[Any, Any]:
    found = None if backend.concrete or not scope.whole else backend.norm_at_once(arrays, order.p)
    if found is not None:
        return found, None
    if backend.splits_by_range and len(arrays.formats) > 1 and not order.extreme:
        groups = [group for group in _by_range(backend, arrays, order) if group.sharing(scope)]
        whole = combine(backend, [partial(backend, group, order, scope) for group in groups], order)
    else:
        whole = partial(backend, arrays, order, scope)
    return rooted(backend, whole, order), whole.divisor


def _beyond_range(
    backend: Backend, arrays: Arrays, order: Order, scope: Scope, value: Array, divisor: Array | None
) -> tuple[Array, Array | None]:
    """Return a norm of complex128 numbers and its divisor, from their quarters if only those give a finite one."""
    xp = backend.xp
    known = xp.isfinite(value)
    # If the parts were divided first, their norm is finite whenever they are.
    by_parts = order.p == 2 and scope.whole and backend.at_once(arrays) is not None
    if by_parts or (backend.concrete and xp.all(known)):
        return value, divisor
    found = value, xp.ones_like(value) if divisor is None else divisor

    def of_quarters() -> tuple[Any, Any]:
        quarter, unit = _computed(backend.quartered(arrays), order, scope, backend)
        unit = xp.ones_like(quarter) if unit is None else unit
        # A number this large has no other divisor. Multiplied by 4 it could leave the range.
        large = quarter > 2.0**500
        new = xp.where(large, quarter * 2.0**-1020, quarter * 4.0), xp.where(large, xp.full_like(unit, 2.0**1022), unit)
        finite = xp.isfinite(quarter)
        return xp.where(finite, new[0], found[0]), xp.where(finite, new[1], found[1])

    return backend.chosen_where(~known, of_quarters, found)


def floor_of(backend: Backend, arrays: Arrays, count: int, order: Order) -> float:
    """Return the most that `count` elements add to a norm if they are read as zero or their magnitudes are rounded."""
    floor = count * max(map(backend.flushed_below, arrays.formats))
    if not arrays.any_complex:
        return floor
    # Each of two parts may be read as zero. One step for the root of their squares and two for a quarter, times 4.
    rounded = 0.0 if order.p == 2 or "complex128" not in arrays.dtypes else count * 16 * FLOAT64.step
    return 2 * floor + rounded


def _by_range(backend: Backend, arrays: Arrays, order: Order) -> list[Arrays]:
    """Split off the arrays whose powers may leave the range, if their sum cannot show it."""
    fitting = {element for element in arrays.formats if element.power_fits(order.p, backend.wide)}
    groups = [[x for x in arrays if (format_of(x) in fitting) is fits] for fits in (True, False)]
    return list(map(arrays.alike, groups))


def relative_error(order: Order, sum_error: float, wide: Format, *, exact: bool) -> float:
    """Return a proven bound on the relative error of a norm, given that of the additions in its sum."""
    if exact:
        return 0.0
    sum_error += 16 * wide.roundoff
    if order.p not in (1, 2) and not order.extreme:
        sum_error += _POW_ERROR[wide.precision]
    return sum_error * max(1.0, 1.0 / order.p if order.p > 0 else 1.0)


def norm_dtype(arrays: Arrays) -> str:
    """Return the dtype of a returned norm: float64 if an array has that precision, else float32."""
    return "float64" if FLOAT64 in arrays.formats else "float32"


def settled(backend: Backend, norm: Norm) -> Norm:
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
