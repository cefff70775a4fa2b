"""Every operation that clipping needs, written once against the array API standard.

Each framework's folder derives its backends from `Portable`. They add what the standard lacks, such as access to a
number's bits, and whatever their devices do differently. No method here reads a value, so the same code can be traced.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gradclip.backends.defaults import Defaults
from gradclip.backends.portable_batch import PortableBatch
from gradclip.backends.sums import filled, halving_sum, raised
from gradclip.core.arrays import Arrays, check_dtypes
from gradclip.core.formats import FLOAT64, Format, format_of, is_complex, low_bits_mask, product_format
from gradclip.core.scopes import Scope
from gradclip.core.values import Array

if TYPE_CHECKING:
    from gradclip.core.records import Coefficient


class Portable(Defaults, PortableBatch):
    """Reductions and scaling of arrays, without reading their values."""

    concrete = False
    visible = False
    divisors_above = 0.0  # excludes zero, and subnormal numbers if a device may read them as zero
    divisors_up_to = math.inf  # smaller if a compiler multiplies by the inverse, which could be subnormal
    splits_by_range = True  # arrays whose powers may overflow or underflow are read twice; the others need not be

    def __init__(self, xp: ModuleType, wide: Format = FLOAT64) -> None:
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

    def enter_in_place(self, leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> Arrays:
        arrays = list(map(self.prepare_in_place, leaves))
        check_dtypes(arrays, names)
        return self.enter(arrays)

    def prepare_in_place(self, leaf: object) -> Any:
        """Return a gradient as an array that shares its memory."""
        return leaf

    def with_care(self, compute: Callable[[Any], Any], arrays: Arrays, count: int) -> Any:
        # Most devices never flush subnormals, so any norm can be trusted.
        return compute(self)

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

    def single(self, value: Array) -> Array:
        return self.xp.astype(value, self.xp.float32)

    def gather(self, terms: Sequence[Array]) -> list[Array]:
        return list(terms)

    def total(self, terms: Sequence[Array]) -> Array:
        here = self.gather(terms)
        return here[0] if len(here) == 1 else self._sum(self.stacked(here), (0,))

    def stacked(self, scalars: Sequence[Array]) -> Array:
        return self.xp.stack(scalars)

    def unstacked(self, vectors: Sequence[Array]) -> list[list[Array]]:
        return [[vector[i] for i in range(vector.shape[0])] for vector in vectors]

    def quartered(self, arrays: Arrays) -> Arrays:
        return arrays.alike([self.join([self.widen(part) * 0.25 for part in self.parts(x)], x) for x in arrays])

    def chosen_where(self, flags: Array, compute: Callable[[], tuple[Array, Array]], found: tuple[Array, Array]) -> Any:
        return tuple(self.xp.where(flags, new, old) for new, old in zip(compute(), found, strict=True))

    def sum_error(self, count: int, arrays: Arrays, p: float, scope: Scope) -> float:
        # A framework's own sum guarantees no order, so a term may go through all additions.
        additions = count if self.wide is FLOAT64 else 2 * count.bit_length()
        return additions * self.wide.roundoff

    def power_sum(self, arrays: Arrays, p: float, scope: Scope, divisor: Array | None = None) -> Array:
        return self.total([self.power_sum_of(x, p, scope, divisor) for x in arrays])

    def scaled_power_sum(self, arrays: Arrays, p: float, scope: Scope) -> tuple[Array, Array]:
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
        found = [self.largest_of(x, scope) for x in filled(arrays, scope)]
        return self.xp.max(self.stacked(self.gather(found)), axis=0)

    def smallest(self, arrays: Arrays, scope: Scope) -> Array:
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

    def count_nonfinite(self, x: Any) -> tuple[int, int]:
        # A complex number can contain both, such as inf + NaN i. It counts once.
        infinite = self.xp.isinf(x)
        return int(self.xp.sum(self.xp.isnan(x) & ~infinite)), int(self.xp.sum(infinite))

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

    def narrow(self, x: Array, like: Array) -> Array:
        """Convert `x` (float32 or wider) to the dtype of `like`, rounded toward zero."""
        source, target = format_of(x), format_of(like)
        if source is target:
            return x
        # A conversion rounds to nearest, which may round up. With the low bits cleared, it is exact.
        cut = self.from_bits(self.bits(x) & low_bits_mask(source, target))
        if target.min_exponent > source.min_exponent:
            below_normal = self.xp.trunc(x / target.step) * target.step  # there the mask keeps too many bits
            cut = self.xp.where(self.xp.abs(x) < target.tiny, below_normal, cut)
        return self.xp.astype(cut, like.dtype)

    def not_above(self, product: Array) -> Array:
        """Return the product, moved one step toward zero if it is below the normal range."""
        # There, rounding to nearest may exceed the exact product by up to half a step.
        nearer = self.xp.nextafter(product, self.xp.zeros_like(product))
        return self.xp.where(self.xp.abs(product) < format_of(product).tiny, nearer, product)

    def leave_all(self, arrays: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        return list(map(self.leave, arrays, leaves))

    @abstractmethod
    def leave(self, array: Any, leaf: Any) -> Any: ...

    def leave_sums(self, wides: Sequence[Any], arrays: Sequence[Any], dtype: str | None) -> list[Any]:
        return [self.leave_sum(wide, x, dtype) for wide, x in zip(wides, arrays, strict=True)]

    @abstractmethod
    def leave_sum(self, wide: Any, x: Any, dtype: str | None) -> Any:
        """Return one sum over examples of `x` in a dtype, as `leave_sums` does."""

    def without_nonfinite(self, arrays: Arrays) -> Arrays:
        return Arrays([self.xp.where(self.xp.isfinite(x), x, self.xp.zeros_like(x)) for x in arrays])

    def shrink(self, arrays: Arrays, coefficient: Coefficient, layout: Scope) -> list[Any]:
        return [self.shrunk(x, coefficient, layout) for x in arrays]

    def shrink_each(self, arrays: Arrays, coefficients: Sequence[Coefficient], scope: Scope) -> list[Any]:
        return [self.shrunk(x, coefficient, scope) for x, coefficient in zip(arrays, coefficients, strict=True)]

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

    def clamped_all(self, prepared: Sequence[Any], leaves: Sequence[Any], bound: float | Array) -> list[Any]:
        return [self.leave(self.clamp(x, bound), leaf) for x, leaf in zip(prepared, leaves, strict=True)]

    def limit(self, bound: float | Array, x: Array) -> Array:
        """Return a bound on magnitudes as a wide scalar; 0 for a negative bound."""
        wide = self.scalar(bound, [x])
        return self.xp.where(wide < 0, self.xp.zeros_like(wide), wide)

    def clamp(self, x: Array, bound: float | Array) -> Array:
        """Return `x` with each element clamped to [-bound, bound], the bound rounded toward zero. NaN stays."""
        with self.precision():
            limit = self.narrow(self.limit(bound, x), x)
        return self.xp.clip(x, -limit, limit)
