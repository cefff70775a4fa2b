"""Arrays in host memory without the kernels: chunk by chunk, so that what is computed of one stays in cache."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gradclip.backends.formats import FLOAT64, format_of, is_complex, product_format
from gradclip.backends.host import HostArray, as_float, is_finite, multiplied, narrowed, widened
from gradclip.backends.portable import Portable, raised


class Chunkwise(Portable):
    """Reductions and scaling of single NumPy arrays."""

    def parts(self, x: HostArray) -> list[HostArray]:
        return x.parts()

    def power_sum_of(self, x: HostArray, p: float, divisor: Any, batched: bool) -> Any:
        def of_wide(wide: np.ndarray, divisor: Any) -> Any:
            scaled = wide if divisor is None else wide / divisor
            return raised(np, scaled, p).sum(axis=-1)

        return self._reduced(x, of_wide, np.add, batched, divisor, separate=p == 2)

    def largest_of(self, x: HostArray, batched: bool) -> Any:
        return self._reduced(x, lambda wide, _: np.abs(wide).max(axis=-1), np.maximum, batched)

    def smallest_of(self, x: HostArray, batched: bool) -> Any:
        def of_wide(wide: np.ndarray, _: Any) -> Any:
            magnitude = np.abs(wide)
            finite = np.isfinite(magnitude.max(axis=-1))
            return np.where(finite, magnitude.min(axis=-1), np.nan)

        return self._reduced(x, of_wide, np.minimum, batched)

    def _reduced(
        self,
        x: HostArray,
        of_wide: Callable[[np.ndarray, Any], Any],
        merge: np.ufunc,
        batched: bool,
        divisor: Any = None,
        *,
        separate: bool = False,
    ) -> Any:
        """Reduce chunk by chunk; parts of complex numbers `separate`ly, or else as magnitudes."""
        if separate and is_complex(x):
            reduced = [self._reduced(p, of_wide, merge, batched, divisor) for p in x.parts()]
            return merge(*reduced)
        if not batched:
            return merge.reduce([of_wide(wide, divisor) for wide in self.wide_chunks(x)])
        result = np.empty(x.shape[0])
        for block, rows in x.rows():
            mine = None if divisor is None else divisor[block, None]
            result[block] = of_wide(widened(rows, x.dtype), mine)
        return result

    def wide_chunks(self, x: HostArray) -> Iterator[np.ndarray]:
        """Yield the elements, complex ones as magnitudes, in float64 pieces."""
        for chunk in x.chunks():
            yield widened(chunk, x.dtype)

    def count_nonfinite(self, x: HostArray) -> tuple[int, int]:
        """Return how many elements are NaN and how many infinite."""
        nans = infinities = 0
        for chunk in x.chunks():
            if not is_finite(chunk, x.dtype).all():
                infinite = np.isinf(as_float(chunk, x.dtype))
                infinities += int(infinite.sum())
                nans += int((np.isnan(as_float(chunk, x.dtype)) & ~infinite).sum())
        return nans, infinities

    def scale_chunks(self, x: HostArray, coefficient: Any) -> None:
        """Scale an array where it is."""
        if coefficient.blank:
            x.data[...] = 0
            return
        for part in x.parts():
            target, source = format_of(part), product_format(part, FLOAT64)
            factors = coefficient.wide if source is FLOAT64 else coefficient.narrow
            for chunk in part.chunks("readwrite"):
                product = multiplied(chunk, part.dtype, source, factors.first, factors.second)
                chunk[...] = narrowed(product, target)

    def weighted_sum(self, x: HostArray, coefficient: Any) -> np.ndarray:
        weights = coefficient.weights(np)
        sums = []
        for part in x.parts():
            total = np.zeros(math.prod(x.shape[1:]))
            for product in _products(part, weights, coefficient.blank):
                total += product.sum(axis=0)
            sums.append(total.reshape(x.shape[1:]))
        return sums[0] if len(sums) == 1 else sums[0] + 1j * sums[1]

    def rounded_sum(self, x: HostArray, coefficient: Any) -> np.ndarray:
        total = np.zeros(math.prod(x.shape[1:]), np.int64)
        for product in _products(x, coefficient.wide, coefficient.blank):
            total += np.rint(product).astype(np.int64).sum(axis=0)
        return total.reshape(x.shape[1:])

    def clamp_chunks(self, x: HostArray, bound: float) -> None:
        """Clamp an array where it is; write only the chunks in which something changes."""
        for chunk in x.chunks("readwrite"):
            wide = widened(chunk, x.dtype)
            if (np.abs(wide) > bound).any():
                chunk[...] = narrowed(np.clip(wide, -bound, bound), format_of(x))


def _products(x: HostArray, factors: Any, blank: Any) -> Iterator[np.ndarray]:
    """Yield blocks of whole examples, each in float64 times its factors, zeros where it is blank."""
    for block, rows in x.rows():
        wide = widened(rows, x.dtype) * factors.first[block, None]
        if factors.second is not None:
            wide *= factors.second[block, None]
        wide[blank[block]] = 0.0
        yield wide
