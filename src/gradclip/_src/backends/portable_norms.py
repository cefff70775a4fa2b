"""Norms, written once against the array API standard: the sums, their divisors, and the proven error.

`core.norms` has the proof. Frameworks replace the steps that their devices do differently: `with_care`, `roots`, the
sums, the largest and smallest magnitudes, and `sum_error` and `flushed_below`, which say what these may lose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, cast

from gradclip._src.backends.sums import filled, halving_sum, raised
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import FLOAT64, Format, format_of, is_complex
from gradclip._src.core.layouts import LAYER, TREE, Layout, Scope, Several
from gradclip._src.core.norms import Norm, Order, one_or_each, relative_error, rooted, stacked_divisors
from gradclip._src.core.values import Arithmetic, Array

_Sum = tuple[Any, Any]  # a sum of (|x| / divisor)**p, or an extreme magnitude, and the divisor; None is 1
_Root = tuple[Any, Any]  # a norm in units of a divisor, and the divisor; None is 1


class PortableNorms:
    """The norms of arrays, without reading their values."""

    concrete = False
    visible = False
    divisors_above = 0.0  # excludes zero, and subnormal numbers if a device may read them as zero
    divisors_up_to = math.inf  # smaller if a compiler multiplies by the inverse, which could be subnormal
    splits_by_range = True  # arrays whose powers may overflow or underflow are read twice; the others need not be

    def __init__(self, xp: ModuleType, wide: Format) -> None:
        self.xp = xp
        self.wide = wide

    @property
    def wide_dtype(self) -> Any:
        """The framework's dtype for `wide`."""
        return getattr(self.xp, self.wide.name)

    def enter(self, prepared: Sequence[Any]) -> Arrays:
        return Arrays(prepared)

    def chosen(self, arrays: Arrays, indices: Sequence[int]) -> Arrays:
        return arrays.alike([arrays[index] for index in indices])

    def multi_tensor(self, arrays: Arrays) -> Mapping[Format, int] | None:
        return None

    def zeros(self, shape: tuple[int, ...], near: Sequence[Array]) -> Array:
        return self.xp.zeros(shape, dtype=self.wide_dtype)

    def norms(self, arrays: Arrays, order: Order, layout: Layout | None = None) -> Norm:
        # `torch.compile` cannot read objects that are defaults of methods.
        scope = TREE if layout is None else layout
        if not isinstance(scope, Scope):
            return self.norms_of_several(arrays, order, scope)
        count = arrays.sharing(scope)
        if not count:
            shape = () if scope.whole else scope.norms_shape(arrays[0].shape)
            return Norm(self.zeros(shape, arrays), None, 0.0, 0.0)
        value, divisor = self.with_care(lambda careful: careful.roots(arrays, order, scope), arrays, count)
        if "complex128" in arrays.dtypes:
            value, divisor = self._beyond_range(arrays, order, scope, value, divisor)
        return Norm(value, divisor, self.error(arrays, order, count, scope), self.floor(arrays, count, order))

    def norms_of_several(self, arrays: Arrays, order: Order, layout: Several) -> Norm:
        """Return the norms of consecutive groups of arrays as a vector."""
        numbers = cast("Arithmetic", self)
        groups = [self.chosen(arrays, part.indices) for part in layout.parts]
        counts = [group.elements() for group in groups]

        def compute(careful: PortableNorms) -> _Root:
            found = [
                careful._in_range(group, order) if count else (self.zeros((), group), None)
                for group, count in zip(groups, counts, strict=True)
            ]
            values, divisors = zip(*found, strict=True)
            return self.stacked(values), stacked_divisors(numbers, values, divisors)

        value, divisor = self.with_care(compute, arrays, max(counts))
        known = list(zip(groups, counts, strict=True))
        errors = [self.error(group, order, count, LAYER) if count else 0.0 for group, count in known]
        floors = [self.floor(group, count, order) if count else 0.0 for group, count in known]
        return Norm(value, divisor, one_or_each(numbers, errors), one_or_each(numbers, floors))

    def floor(self, arrays: Arrays, count: int, order: Order) -> float:
        floor = count * max(map(self.flushed_below, arrays.formats))
        if not arrays.any_complex:
            return floor
        # Each of two parts may be read as zero. One step for the root of their squares and two for a quarter, times 4.
        rounded = 0.0 if order.p == 2 or "complex128" not in arrays.dtypes else count * 16 * FLOAT64.step
        return 2 * floor + rounded

    def error(self, arrays: Arrays, order: Order, count: int, scope: Scope) -> float:
        """Return a bound on the relative error of a norm of `count` elements."""
        exact = order.extreme and not arrays.any_complex
        return relative_error(order, self.sum_error(count, arrays, order.p, scope), self.wide, exact=exact)

    def with_care(self, compute: Callable[[Any], _Root], arrays: Arrays, count: int) -> _Root:
        """Return `compute(backend)`, norms of `count` elements, from a backend whose reading can be trusted."""
        # Most devices never flush subnormals, so any norm can be trusted.
        return compute(self)

    def flushed_below(self, element: Format) -> float:
        """Return the magnitude below which elements may be read as zero, or 0.0 if none are."""
        return 0.0

    def sum_error(self, count: int, arrays: Arrays, p: float, scope: Scope) -> float:
        """Return a bound on the relative rounding error of the additions in a sum of `count` powers of elements."""
        # A framework's own sum guarantees no order, so a term may go through all additions.
        additions = count if self.wide is FLOAT64 else 2 * count.bit_length()
        return additions * self.wide.roundoff

    def roots(self, arrays: Arrays, order: Order, scope: Scope) -> _Root:
        """Return norms, not necessarily right for complex numbers with a magnitude beyond the range."""
        if self.splits_by_range and len(arrays.formats) > 1 and not order.extreme:
            groups = [group for group in self._by_range(arrays, order) if group.sharing(scope)]
            total, divisor = self._combined([self._sum_of(group, order, scope) for group in groups], order)
        else:
            total, divisor = self._sum_of(arrays, order, scope)
        return rooted(self.xp, total, order), divisor

    def _in_range(self, arrays: Arrays, order: Order) -> _Root:
        found = self.roots(arrays, order, LAYER)
        return self._beyond_range(arrays, order, LAYER, *found) if "complex128" in arrays.dtypes else found

    def _sum_of(self, arrays: Arrays, order: Order, scope: Scope) -> _Sum:
        if order.extreme:
            return (self.largest if order.p > 0 else self.smallest)(arrays, scope), None
        for element in arrays.formats:
            if not element.power_fits(order.p, self.wide):
                return self.scaled_power_sum(arrays, order.p, scope)
        return self.power_sum(arrays, order.p, scope), None

    def _by_range(self, arrays: Arrays, order: Order) -> list[Arrays]:
        """Split off the arrays whose powers may leave the range, if their sum cannot show it."""
        fitting = {element for element in arrays.formats if element.power_fits(order.p, self.wide)}
        groups = [[x for x in arrays if (format_of(x) in fitting) is fits] for fits in (True, False)]
        return list(map(arrays.alike, groups))

    def _combined(self, found: Sequence[_Sum], order: Order) -> _Sum:
        """Return the sum of several sums of powers, and its divisor."""
        xp, totals = self.xp, self.gather([total for total, _ in found])
        if all(divisor is None for _, divisor in found):
            return self.total(totals), None
        one = xp.ones_like(totals[0])
        divisors = self.gather([one if divisor is None else divisor for _, divisor in found])
        weighed = [xp.where(t > 0, d, 0.0) for t, d in zip(totals, divisors, strict=True)]
        common = xp.max(xp.stack(weighed), axis=0)
        common = xp.where(common > 0, common, 1.0)
        rescaled = [
            xp.where(total > 0, total * (divisor / common) ** order.p, total)
            for total, divisor in zip(totals, divisors, strict=True)
        ]
        return self.total(rescaled), common

    def _beyond_range(
        self, arrays: Arrays, order: Order, scope: Scope, value: Array, divisor: Array | None
    ) -> tuple[Array, Array | None]:
        """Return a norm of complex128 numbers and its divisor, from their quarters if only those give a finite one."""
        xp = self.xp
        known = xp.isfinite(value)
        # If the parts were divided first, their norm is finite whenever they are.
        by_parts = order.p == 2 and scope.whole and self.multi_tensor(arrays) is not None
        if by_parts or (self.concrete and xp.all(known)):
            return value, divisor
        found = value, xp.ones_like(value) if divisor is None else divisor

        def of_quarters() -> tuple[Any, Any]:
            quarter, unit = self.roots(self.quartered(arrays), order, scope)
            unit = xp.ones_like(quarter) if unit is None else unit
            # A number this large has no other divisor. Multiplied by 4 it could leave the range.
            large = quarter > 2.0**500
            new = xp.where(large, quarter * 2.0**-1020, quarter * 4.0)
            units = xp.where(large, xp.full_like(unit, 2.0**1022), unit)
            finite = xp.isfinite(quarter)
            return xp.where(finite, new, found[0]), xp.where(finite, units, found[1])

        return self.redo_where(~known, of_quarters, found)

    def quartered(self, arrays: Arrays) -> Arrays:
        """Return each array multiplied by 0.25, in the wide format."""
        return arrays.alike([self.join([self.widen(part) * 0.25 for part in self.parts(x)], x) for x in arrays])

    def redo_where(self, flags: Array, compute: Callable[[], tuple[Array, Array]], found: tuple[Array, Array]) -> Any:
        """Return a pair of wide scalars or vectors: `compute()` where the flags are set, `found` elsewhere."""
        return tuple(self.xp.where(flags, new, old) for new, old in zip(compute(), found, strict=True))

    def gather(self, terms: Sequence[Array]) -> list[Array]:
        """Move scalars or vectors from several devices to one, so that they can be combined."""
        return list(terms)

    def total(self, terms: Sequence[Array]) -> Array:
        """Return the sum of scalars or vectors."""
        here = self.gather(terms)
        return here[0] if len(here) == 1 else self._sum(self.stacked(here), (0,))

    def stacked(self, scalars: Sequence[Array]) -> Array:
        return self.xp.stack(scalars)

    def unstacked(self, vectors: Sequence[Array]) -> list[list[Array]]:
        return [[vector[i] for i in range(vector.shape[0])] for vector in vectors]

    def power_sum(self, arrays: Arrays, p: float, scope: Scope, divisor: Array | None = None) -> Array:
        """Return the sum of (|x| / divisor)**p over all arrays, for each norm of the scope."""
        return self.total([self.power_sum_of(x, p, scope, divisor) for x in arrays])

    def scaled_power_sum(self, arrays: Arrays, p: float, scope: Scope) -> tuple[Array, Array]:
        """Return power sums whose terms could overflow or underflow, and their divisors."""
        divisor = self.divisor(self.largest(arrays, scope))
        return self.power_sum(arrays, p, scope, divisor), divisor

    def divisor(self, largest: Array) -> Array:
        """Return the divisor for numbers with these largest magnitudes."""
        # Infinity divided by itself is NaN, and so is zero.
        divisor = self.xp.where(self.xp.isfinite(largest) & (largest > self.divisors_above), largest, 1.0)
        if self.divisors_up_to == math.inf:
            return divisor
        return self.xp.where(divisor > self.divisors_up_to, self.divisors_up_to, divisor)

    def largest(self, arrays: Arrays, scope: Scope) -> Array:
        """Return the largest magnitude, or NaN if any element is NaN."""
        found = [self.largest_of(x, scope) for x in filled(arrays, scope)]
        return self.xp.max(self.stacked(self.gather(found)), axis=0)

    def smallest(self, arrays: Arrays, scope: Scope) -> Array:
        """Return the smallest magnitude, or NaN if any element is non-finite."""
        found = [self.smallest_of(x, scope) for x in filled(arrays, scope)]
        return self.xp.min(self.stacked(self.gather(found)), axis=0)

    def power_sum_of(self, x: Array, p: float, scope: Scope, divisor: Array | None) -> Array:
        """Return the sum of powers for one array."""
        bases = self.bases(x, p)
        if divisor is not None:
            bases = [wide / scope.over(divisor, wide) for wide in bases]
        return self.sum_all([raised(self.xp, wide, p) for wide in bases], scope)

    def bases(self, x: Array, p: float) -> list[Array]:
        """Return wide arrays whose sums of |wide|**p add up to the sum of |x|**p."""
        # |x|**2 is the sum of the squared parts, so no square root is needed.
        return [self.widen(part) for part in self.parts(x)] if p == 2 else [self.magnitude(x)]

    def sum_all(self, powers: Sequence[Array], scope: Scope) -> Array:
        """Return the sum over one or two wide arrays of the same shape."""
        sums = [self.sum_shared(x, scope) for x in powers]
        return sums[0] if len(sums) == 1 else sums[0] + sums[1]

    def largest_of(self, x: Array, scope: Scope) -> Array:
        """Return the largest magnitude of one array."""
        return self.xp.max(self.magnitude(x), axis=scope.shared_axes(x.ndim))

    def smallest_of(self, x: Array, scope: Scope) -> Array:
        """Return the smallest magnitude of one array."""
        magnitude = self.magnitude(x)
        axes = scope.shared_axes(x.ndim)
        # The minimum would ignore an infinity. The maximum of no elements is -inf.
        finite = self.xp.max(magnitude, axis=axes) < math.inf
        return self.xp.where(finite, self.xp.min(magnitude, axis=axes), self.xp.nan)

    def magnitude(self, x: Array) -> Array:
        """Return |x| in the wide format."""
        parts = [self.widen(part) for part in self.parts(x)]
        return self.xp.abs(parts[0]) if len(parts) == 1 else self.xp.hypot(*parts)

    def sum_shared(self, wide: Array, scope: Scope) -> Array:
        """Return the sum over the axes that share a norm."""
        return self._sum(wide, scope.shared_axes(wide.ndim))

    def _sum(self, wide: Array, axes: tuple[int, ...]) -> Array:
        return self.xp.sum(wide, axis=axes) if self.wide is FLOAT64 else halving_sum(self.xp, wide, axes)

    def parts(self, x: Array) -> list[Array]:
        """Return the real and imaginary parts, or the array itself if it is real."""
        return [self.xp.real(x), self.xp.imag(x)] if is_complex(x) else [x]

    def join(self, parts: list[Array], like: Array) -> Array:
        """Return the complex array with these two parts, or the single real part."""
        return parts[0] if len(parts) == 1 else self.complex(*parts)

    def complex(self, real: Array, imag: Array) -> Array:
        """Return the complex array with these parts."""
        raise NotImplementedError

    def widen(self, x: Array) -> Array:
        """Convert a real array to the wide format, exactly."""
        return self.xp.astype(x, self.wide_dtype)
