"""Every operation that clipping needs, once, in the terms of the array API standard.

A framework's file beside this one derives from `Portable` and supplies what the standard lacks (reading the
bits of a number) or what its devices do differently. All arithmetic happens in `wide`, float64 where the device
has it, and nothing here looks at a value: the same code traces.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from gradclip.backends.formats import FLOAT64, Format, format_of, is_complex

Array = Any


class Portable:
    """Reductions and scaling of arrays whose values need not be known yet."""

    concrete = False  # values lie in host memory: a look at them costs nothing
    visible = False  # values can be looked at, if only by waiting for a device

    def __init__(self, xp: Any, wide: Format = FLOAT64) -> None:
        self.xp = xp
        self.wide = wide
        self.wide_dtype = getattr(xp, wide.name)

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context in which `wide` may be used."""
        return nullcontext()

    def flushed_below(self, x: Array) -> float:
        """Return the magnitude below which `widen` may read an element as zero, 0.0 where it never does."""
        return 0.0

    def with_care(self, compute: Callable[[], Any], arrays: Sequence[Array], count: int) -> Any:
        """Return what `compute` returns, a norm of `count` elements and its divisor; here any norm can be trusted."""
        return compute()

    def bits(self, x: Array) -> Array:
        """Return the bits of a wide array as integers of the same size."""
        raise NotImplementedError

    def from_bits(self, bits: Array) -> Array:
        """Return the wide array that has these bits."""
        raise NotImplementedError

    # Scalars

    def scalar(self, value: Any, near: Sequence[Array]) -> Array:
        """Return a number as a wide scalar on the device of the arrays."""
        return self.xp.asarray(value, dtype=self.wide_dtype)

    def total(self, terms: Sequence[Array]) -> Array:
        """Return the sum of scalars, or of vectors, that may live on several devices."""
        return terms[0] if len(terms) == 1 else self._sum(self.xp.stack(list(terms)), (0,))

    # Reductions

    def power_sum(self, x: Array, p: float, divisor: Array = None, *, batched: bool = False) -> Array:
        """Return the sum of (|x| / divisor)**p over all axes, or over all but the first."""
        wides = [self.widen(part) for part in self.parts(x)] if p == 2 else [self.magnitude(x)]
        if divisor is not None:
            wides = [wide / self._over_examples(divisor, wide) for wide in wides]
        sums = [self._sum(raised(self.xp, wide, p), self._axes(wide, batched)) for wide in wides]
        return sums[0] if len(sums) == 1 else sums[0] + sums[1]

    def largest(self, x: Array, *, batched: bool = False) -> Array:
        """Return the largest magnitude, NaN where one is NaN."""
        return self.xp.max(self.magnitude(x), axis=self._axes(x, batched))

    def smallest(self, x: Array, *, batched: bool = False) -> Array:
        """Return the smallest magnitude, NaN where one is not finite."""
        magnitude = self.magnitude(x)
        axes = self._axes(x, batched)
        finite = self.xp.isfinite(self.xp.max(magnitude, axis=axes))
        return self.xp.where(finite, self.xp.min(magnitude, axis=axes), self.xp.nan)

    def magnitude(self, x: Array) -> Array:
        """Return |x| in the wide format."""
        parts = [self.widen(part) for part in self.parts(x)]
        return self.xp.abs(parts[0]) if len(parts) == 1 else self.xp.hypot(*parts)

    def _sum(self, wide: Array, axes: tuple[int, ...]) -> Array:
        if self.wide is FLOAT64:
            return self.xp.sum(wide, axis=axes)
        return halving_sum(self.xp, wide, axes)

    def _axes(self, x: Array, batched: bool) -> tuple[int, ...]:
        return tuple(range(int(batched), x.ndim))

    def _over_examples(self, value: Array, like: Array) -> Array:
        """Shape a scalar, or a vector with one value an example, so that it broadcasts to `like`."""
        if getattr(value, "ndim", 0) == 0:
            return value
        return self.xp.reshape(value, (-1,) + (1,) * (like.ndim - 1))

    # Conversions

    def parts(self, x: Array) -> list[Array]:
        """Return the real and imaginary part, or the real array alone."""
        return [self.xp.real(x), self.xp.imag(x)] if is_complex(x) else [x]

    def join(self, parts: list[Array], like: Array) -> Array:
        """Return the complex array of two parts, or the one real part."""
        return parts[0] if len(parts) == 1 else self.complex(*parts)

    def complex(self, real: Array, imag: Array) -> Array:
        """Return the complex array of two parts."""
        raise NotImplementedError

    def widen(self, x: Array) -> Array:
        """Return a real array in the wide format, exactly."""
        return self.xp.astype(x, self.wide_dtype)

    def narrow(self, wide: Array, like: Array) -> Array:
        """Return `wide` in the dtype of `like`, rounded toward zero."""
        target = format_of(like)
        if target.precision == self.wide.precision:
            return self.xp.where(self.xp.abs(wide) < target.tiny, 0.0, wide)
        cut = self.from_bits(self.bits(wide) & low_bits_mask(self.wide, target))
        below_normal = self.xp.trunc(wide / target.step) * target.step
        cut = self.xp.where(self.xp.abs(wide) < target.tiny, below_normal, cut)
        return self.xp.astype(cut, like.dtype)

    def count_nonfinite(self, x: Array) -> tuple[int, int]:
        """Return how many elements are NaN and how many infinite: this waits for the values."""
        magnitude = self.magnitude(x)
        return int(self.xp.sum(self.xp.isnan(magnitude))), int(self.xp.sum(self.xp.isinf(magnitude)))

    # Results

    def without_nonfinite(self, x: Array) -> Array:
        """Return `x` with zeros in place of NaN and the infinities."""
        return self.xp.where(self.xp.isfinite(x), x, self.xp.zeros_like(x))

    def shrink(self, x: Array, coefficient: Any) -> Array:
        """Return `x` scaled by the coefficient, each element rounded toward zero."""
        shrunk = [self.narrow(self.scaled(part, coefficient), part) for part in self.parts(x)]
        result = self.xp.where(
            self._over_examples(coefficient.blank, x),
            self.xp.zeros_like(x),
            self.join(shrunk, x),
        )
        return self.xp.where(self._over_examples(coefficient.keep, x), x, result)

    def scaled(self, x: Array, coefficient: Any) -> Array:
        """Return the real array `x`, widened, times the coefficient."""
        wide = self.widen(x) * self._over_examples(coefficient.factor, x)
        if coefficient.second is None:
            return wide
        return wide * self._over_examples(coefficient.second, x)

    def weighted_sum(self, x: Array, coefficient: Any) -> Array:
        """Return the sum over the first axis of each example times its own coefficient, wide."""
        weighed = replace(coefficient, factor=self.xp.where(coefficient.keep, 1.0, coefficient.factor))
        sums = []
        for part in self.parts(x):
            blank = self._over_examples(coefficient.blank, part)
            product = self.xp.where(blank, 0.0, self.scaled(part, weighed))
            sums.append(self._sum(product, (0,)))
        return self.join(sums, x)

    def limit(self, bound: Any, x: Array) -> Array:
        """Return a bound on magnitudes as a wide scalar, 0 for a negative one."""
        wide = self.scalar(bound, [x])
        return self.xp.where(wide < 0, self.xp.zeros_like(wide), wide)

    def clamp(self, x: Array, bound: float) -> Array:
        """Return `x` with each element in [-bound, bound], the bound rounded toward zero; NaN stays."""
        with self.precision():
            limit = self.narrow(self.limit(bound, x), x)
        return self.xp.clip(x, -limit, limit)


def raised(xp: Any, wide: Array, p: float) -> Array:
    """Return |wide|**p."""
    if p == 2:
        return wide * wide
    magnitude = xp.abs(wide)
    return magnitude if p == 1 else magnitude**p


def low_bits_mask(wide: Format, target: Format) -> int:
    """Return the integer that keeps those bits of a `wide` number which `target` has too."""
    return -(1 << (wide.precision - target.precision))


def halving_sum(xp: Any, terms: Array, axes: tuple[int, ...]) -> Array:
    """Return the sum over `axes`, adding the second half to the first until one term is left.

    Each term takes part in ceil(log2(n)) additions, which is what the error bound counts on.
    """
    kept = [n for axis, n in enumerate(terms.shape) if axis not in axes]
    order = (*axes, *(axis for axis in range(terms.ndim) if axis not in axes))
    rest = xp.reshape(xp.permute_dims(terms, order), (-1, *kept))
    while rest.shape[0] > 1:
        half = rest.shape[0] // 2
        paired = rest[:half] + rest[half : 2 * half]
        rest = xp.concat([paired, rest[2 * half :]]) if rest.shape[0] % 2 else paired
    return rest[0]
