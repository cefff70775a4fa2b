"""Every operation that clipping needs, written once against the array API standard.

Each framework's folder derives its backends from `Portable`. They add what the standard lacks, such as access to a
number's bits, and whatever their devices do differently. No method here reads a value, so the same code can be traced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gradclip._src.backends.portable_norms import PortableNorms
from gradclip._src.backends.sums import over_examples
from gradclip._src.core.arrays import Arrays, check_dtypes
from gradclip._src.core.formats import FLOAT64, format_of, low_bits_mask, product_format
from gradclip._src.core.layouts import LAYER, Layout, Scope, Several
from gradclip._src.core.memory import Region, any_overlap, meeting
from gradclip._src.core.rules import Coefficient, Factors, Into, Rule
from gradclip._src.core.values import Array


class Portable(PortableNorms, ABC):
    """Norms, scaling and sums over examples, without reading values."""

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
        each = _split_up(self, coefficient, layout, arrays)
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
        first = over_examples(factors.first, x)
        return self.multiplied(
            self.widen(x), first, None if factors.second is None else over_examples(factors.second, x)
        )

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


def _split_up(backend: Any, coefficient: Coefficient, layout: Several, arrays: Arrays) -> list[Coefficient]:
    """Return the coefficient of each array, from vectors with one entry for each group."""
    narrow = any(product_format(x, backend.wide) is not backend.wide for x in arrays)
    pairs = [coefficient.wide, coefficient.narrow] if narrow else [coefficient.wide]
    factors = [factor for pair in pairs for factor in (pair.first, pair.second)]
    given = [coefficient.keep, coefficient.blank, *(x for x in factors if x is not None)]
    found = iter(backend.unstacked(given))
    keeps, blanks = next(found), next(found)
    nothing = [None] * len(keeps)
    scalars = [nothing if factor is None else next(found) for factor in factors]
    wides = list(map(Factors, *scalars[:2]))
    each = list(map(Coefficient, keeps, blanks, wides, map(Factors, *scalars[2:]) if narrow else wides))
    return [one for one, part in zip(each, layout.parts, strict=True) for _ in part.indices]
