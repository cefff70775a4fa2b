"""Every operation that clipping needs, written once against the array API standard.

Each framework's folder derives its backends from `Portable`. They add what the standard lacks, such as access to a
number's bits, and whatever their devices do differently (proofs/bits.py, proofs/frameworks.py). No method here reads a
value, so the same code can be traced.

Norms are sums with their divisors, and a proven error; `core.norms` has the proof. Of these frameworks replace
`with_care`, `roots`, the sums, the largest and smallest magnitudes, and `sum_error` and `flushed_below`, which say what
these may lose.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, cast

from gradclip._src.backends.sums import filled, halving_sum, over_examples, raised
from gradclip._src.core.arrays import Arrays, check_dtypes
from gradclip._src.core.coefficient import of_each_array
from gradclip._src.core.formats import FLOAT64, Format, format_of, is_complex, low_bits_mask, product_format
from gradclip._src.core.layouts import LAYER, TREE, Layout, Scope, Several
from gradclip._src.core.memory import Region, any_overlap, meeting
from gradclip._src.core.norms import Norm, Order, one_or_each, relative_error, rooted, stacked_divisors
from gradclip._src.core.rules import Coefficient, Factors, Into, Rule
from gradclip._src.core.values import Arithmetic, Array

_Sum = tuple[Any, Any]  # a sum of (|x| / divisor)**p, or an extreme magnitude, and the divisor; None is 1
_Root = tuple[Any, Any]  # a norm in units of a divisor, and the divisor; None is 1


class Portable(ABC):
    """Norms, scaling and sums over examples, without reading values."""

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

        def compute(careful: Portable) -> _Root:
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

    def precision(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def varies(self, value: object) -> bool:
        return False

    def plain(self, leaves: Sequence[Any]) -> bool:
        return False

    def vectorisable_with(self, arrays: Sequence[Any]) -> Hashable | None:
        return None

    def mesh(self, axis_name: Hashable) -> Any:
        raise TypeError(
            f"axis_name={axis_name!r} names axes of a mesh inside jax.shard_map, where all arrays are JAX arrays, but "
            "the arrays here are not. Leave it out for arrays of other frameworks."
        )

    def on_each_device(self, arrays: Arrays) -> Callable[..., Any] | None:
        return None

    def region(self, leaf: object) -> Region | None:
        """Return a gradient's region in memory, or None if it shares memory with no other writable gradient."""
        return None

    def meeting(self, leaves: Sequence[Any], owners: Sequence[Any]) -> list[list[int]]:
        return meeting(list(map(self.region, leaves)))

    def collide(self, leaves: Sequence[Any], arrays: Arrays) -> bool:
        regions = map(self.region, leaves)
        return any_overlap((region.address, region.end) for region in regions if region is not None)

    def types_of(self, leaves: Sequence[Any]) -> Sequence[Any]:
        return leaves

    def enter_in_place(self, leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> Arrays:
        arrays = list(map(self.prepare_in_place, leaves))
        check_dtypes(arrays, names)
        return self.enter(arrays)

    def prepare_in_place(self, leaf: object) -> Any:
        """Return a gradient as an array that shares its memory."""
        return leaf

    def check_sum_dtype(self, dtype: str | None) -> None:
        if dtype is not None and "64" in dtype and self.wide is not FLOAT64:
            raise ValueError(f"sums in {dtype} need a device that computes in 64 bits. Move the gradients to the CPU.")

    def bits(self, x: Array) -> Array:
        """Return the bits of a floating-point array as integers of the same size."""
        raise NotImplementedError

    def from_bits(self, bits: Array) -> Array:
        """Return the floating-point array with these bits."""
        raise NotImplementedError

    def scalar(self, value: float | Array, near: Sequence[Array]) -> Array:
        return self.xp.asarray(value, dtype=self.wide_dtype)

    def count_nonfinite(self, x: Any) -> tuple[int, int]:
        # A complex number can contain both, such as inf + NaN i. It counts once.
        infinite = self.xp.isinf(x)
        return int(self.xp.sum(self.xp.isnan(x) & ~infinite)), int(self.xp.sum(infinite))

    def narrow(self, x: Array, like: Array) -> Array:
        """Convert `x` (float32 or wider) to the dtype of `like`, rounded toward zero."""
        source, target = format_of(x), format_of(like)
        if source is target:
            return x
        cut = self.cut(x, target)
        if target.min_exponent > source.min_exponent:
            below_normal = self.xp.trunc(x / target.step) * target.step  # there the mask keeps too many bits
            cut = self.xp.where(self.xp.abs(x) < target.tiny, below_normal, cut)
        return self.xp.astype(cut, like.dtype)

    def cut(self, x: Array, target: Format) -> Array:
        """Return `x` with the low bits cleared that a narrower format has no place for, where it is normal."""
        # A conversion rounds to nearest, which may round up. Afterwards it is exact.
        return self.from_bits(self.bits(x) & low_bits_mask(format_of(x), target))

    def not_above(self, product: Array) -> Array:
        """Return the product, moved one step toward zero if it is below the normal range."""
        # There, rounding to nearest may exceed the exact product by up to half a step. Zeros keep their sign.
        nearer = self.xp.nextafter(product, product * 0.0)
        return self.xp.where(self.xp.abs(product) < format_of(product).tiny, nearer, product)

    def leave_all(self, arrays: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        return list(map(self.leave, arrays, leaves))

    @abstractmethod
    def leave(self, array: Any, leaf: Any) -> Any:
        """Return one result in the form the user passed, as `leave_all` does."""

    def leave_sums(self, wides: Sequence[Any], arrays: Sequence[Any], dtype: str | None) -> list[Any]:
        return [self.leave_sum(wide, x, dtype) for wide, x in zip(wides, arrays, strict=True)]

    @abstractmethod
    def leave_sum(self, wide: Any, x: Any, dtype: str | None) -> Any:
        """Return one sum over examples of `x` in a dtype, as `leave_sums` does."""

    def without_nonfinite(self, arrays: Arrays) -> Arrays:
        return Arrays([self.xp.where(self.xp.isfinite(x), x, self.xp.zeros_like(x)) for x in arrays])

    def clear(self, arrays: Arrays) -> None:
        raise NotImplementedError  # asked only of arrays that can be written

    def scale(self, arrays: Arrays, coefficient: Any, layout: Layout, into: Into | None = None) -> Sequence[Any]:
        results = self.shrink(arrays, coefficient, layout)
        return results if into is None else self.write(results, into)

    def clamp(self, arrays: Arrays, bound: float | Array, into: Into | None = None) -> Sequence[Any]:
        results = [self.clamped(x, bound) for x in arrays]
        return results if into is None else self.write(results, into)

    def write(self, results: Sequence[Any], into: Into) -> Sequence[Any]:
        """Write results into leaves. Return the leaves, or replacements of those that cannot be written."""
        raise NotImplementedError

    def write_back(self, leaf: Any, copy: Any) -> None:
        raise NotImplementedError  # asked only of a gradient with a region

    def shrink(self, arrays: Arrays, coefficient: Coefficient, layout: Layout) -> list[Any]:
        """Return the arrays, scaled."""
        if isinstance(layout, Scope):
            return [self.shrunk(x, coefficient, layout) for x in arrays]
        each = of_each_array(cast(Arithmetic, self), coefficient, layout, arrays)
        return [self.shrunk(x, own, LAYER) for x, own in zip(arrays, each, strict=True)]

    def shrunk(self, x: Array, coefficient: Coefficient, scope: Scope) -> Array:
        """Return one array, scaled."""
        factors = coefficient.wide if product_format(x, self.wide) is self.wide else coefficient.narrow
        keep, blank, first = [scope.over(value, x) for value in (coefficient.keep, coefficient.blank, factors.first)]
        return self.scaled(x, keep, blank, first, None if factors.second is None else scope.over(factors.second, x))

    def scaled(self, x: Array, keep: Array, blank: Array, first: Array, second: Array | None) -> Array:
        """Return one array scaled by the values of a coefficient, each shaped to broadcast to the array."""
        results = [self.narrow(self.product(part, first, second), part) for part in self.parts(x)]
        # Selected, not multiplied: 0 * NaN is NaN, and elements that are kept must stay bit-identical.
        result = self.xp.where(blank, self.xp.zeros_like(x), self.join(results, x))
        return self.xp.where(keep, x, result)

    def product(self, x: Array, first: Array, second: Array | None) -> Array:
        """Return the real array `x` times two factors, in a format that holds each element of `x` exactly."""
        in_wide = product_format(x, self.wide) is self.wide
        product = self.multiplied(self.widen(x) if in_wide else self.xp.astype(x, self.xp.float32), first, second)
        # Narrowing to a format with a smaller exponent range already truncates tiny numbers. Otherwise, do it here.
        same_range = format_of(product).min_exponent == format_of(x).min_exponent
        return self.not_above(product) if same_range else product

    def limit(self, bound: float | Array, x: Array) -> Array:
        """Return a bound on magnitudes as a wide scalar; 0 for a negative bound."""
        wide = self.scalar(bound, [x])
        return self.xp.where(wide < 0, self.xp.zeros_like(wide), wide)

    def clamped(self, x: Array, bound: float | Array) -> Array:
        """Return `x` with each element clamped to [-bound, bound], the bound rounded toward zero. NaN stays."""
        with self.precision():
            limit = self.narrow(self.limit(bound, x), x)
        return self.xp.clip(x, -limit, limit)

    def examples_error(self, arrays: Arrays, count: int) -> float | None:
        return None if FLOAT64 in arrays.formats else count * FLOAT64.roundoff

    def add_examples(
        self, arrays: Arrays, weighing: Rule, mask: Array | None, *, spoil: bool
    ) -> tuple[list[Any], Array] | None:
        return None

    def rounded_sum(self, x: Any, coefficient: Coefficient) -> Array:
        """Return the sum of one array over its examples, each rounded to integers."""
        blank = over_examples(coefficient.blank, x)
        product = self.xp.where(blank, 0.0, self._weighed(x, coefficient.wide))
        return self.xp.sum(self.xp.astype(self.xp.round(product), self.xp.int64), axis=0)  # exact in any order

    def multiplied(self, x: Array, first: Array, second: Array | None) -> Array:
        """Return an array times two factors, one after the other: the product of the two may leave the range."""
        product = x * first
        return product if second is None else product * second

    def _weighed(self, x: Array, factors: Factors) -> Array:
        """Return a real array in the wide format, each example times its factors."""
        second = None if factors.second is None else over_examples(factors.second, x)
        return self.multiplied(self.widen(x), over_examples(factors.first, x), second)

    def zeroed(self, arrays: Arrays) -> Arrays:
        return self.without_nonfinite(arrays)

    def weighted_sums(self, arrays: Arrays, coefficient: Coefficient, *, integers: bool = False) -> list[Array]:
        summed = self.rounded_sum if integers else self.weighted_sum
        return [summed(x, coefficient) for x in arrays]

    def weighted_sum(self, x: Any, coefficient: Coefficient) -> Array:
        """Return the weighted sum of one array over its examples."""
        weights = coefficient.weights(self.xp)
        sums = []
        for part in self.parts(x):
            blank = over_examples(coefficient.blank, part)
            product = self.xp.where(blank, 0.0, self._weighed(part, weights))
            sums.append(self._sum(product, (0,)))
        return self.join(sums, x)
