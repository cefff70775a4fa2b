"""Arrays in host memory: NumPy's own, and views of other frameworks' CPU arrays.

Here values are known, so nothing is computed that a look at them makes needless. Work goes in chunks that stay
in cache; the operations on a chunk are those of `portable`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from array_api_compat import numpy as namespace

from gradclip.backends.formats import BFLOAT16, SUPPORTED, dtype_name, format_of, is_complex
from gradclip.backends.host import HostArray, narrowed, widened
from gradclip.backends.portable import Portable, raised


class Host(Portable):
    """Clipping over NumPy arrays."""

    concrete = True
    visible = True

    def __init__(self) -> None:
        super().__init__(namespace)

    def precision(self) -> AbstractContextManager[Any]:
        return np.errstate(all="ignore")

    # Frameworks whose arrays can be viewed as NumPy's derive from this class and change these.

    def prepare(self, leaf: Any) -> np.ndarray:
        """Return a leaf as an array that can be clipped, integers promoted to the default float."""
        array = np.asarray(leaf)
        return checked_dtype(array.astype(np.float64) if array.dtype.kind in "iu" else array)

    def prepare_in_place(self, leaf: Any, name: str) -> Any:
        """Return a gradient as an array that shares its memory. Raises TypeError for integers."""
        return checked_dtype(np.asarray(leaf), name)

    def writable(self, leaf: Any) -> bool:
        """Say whether a gradient can be written where it lies."""
        return isinstance(leaf, np.ndarray) and leaf.flags.writeable

    def wrote(self, leaf: Any) -> None:
        """Take note that a gradient has been written behind its framework's back."""

    def update(self, leaf: Any, x: HostArray, new: HostArray, coefficient: Any) -> Any:
        """Scale the gradient `leaf`, which is `x`, from `new` on; return it, or another that replaces it."""
        if new is x and coefficient.keep:
            return leaf
        if not self.writable(leaf):
            return self.leave(self.shrink(new, coefficient), leaf)
        if new is not x:
            x.data[...] = new.data
        self.shrink_(x, coefficient)
        self.wrote(leaf)
        return leaf

    def update_clamped(self, leaf: Any, x: HostArray, bound: float) -> Any:
        """Clamp the gradient `leaf`, which is `x`; return it, or another that replaces it."""
        if not self.writable(leaf):
            return self.leave(self.clamp(x, bound), leaf)
        self.clamp_(x, bound)
        self.wrote(leaf)
        return leaf

    def enter(self, leaf: np.ndarray) -> HostArray:
        """Return a prepared leaf as the array that the operations take."""
        return HostArray.of(leaf)

    def leave(self, array: HostArray, leaf: Any) -> Any:
        """Return a result as what the user passed: an array, or a number for a number."""
        data = array.data.view(leaf.dtype) if array.dtype == BFLOAT16.name else array.data
        return data if isinstance(leaf, np.ndarray) else data[()]

    def leave_sum(self, wide: np.ndarray, x: HostArray) -> Any:
        """Return a sum over examples of `x`, in float32 unless it has float64 precision."""
        return wide.astype(sum_dtype(x, wide))

    def leave_count(self, flags: np.ndarray) -> Any:
        """Return how many flags are set, as an integer scalar."""
        return np.sum(flags)

    def leave_scalar(self, value: Any, dtype: str, leaves: Sequence[Any]) -> Any:
        """Return a wide scalar, or a vector with one value an example, in the named dtype."""
        return np.asarray(value).astype(dtype)[()]

    def scalar(self, value: Any, near: Any) -> Any:
        return np.float64(value)

    def booleans(self, mask: Any) -> np.ndarray:
        """Return a mask as a boolean array."""
        return np.asarray(mask, dtype=bool)

    def zeros(self, shape: tuple[int, ...], near: Sequence[Any]) -> Any:
        """Return wide zeros."""
        return np.zeros(shape)[()]

    def gather(self, terms: Sequence[Any]) -> list[Any]:
        """Return the scalars where they can be added: here they are."""
        return list(terms)

    def differentiable(self, function: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        """Return the function as it is: values known to the host carry no derivative."""
        return function

    # Reductions

    def power_sum(self, x: HostArray, p: float, divisor: Any = None, *, batched: bool = False) -> Any:
        def of_wide(wide: np.ndarray, divisor: Any) -> Any:
            scaled = wide if divisor is None else wide / divisor
            return raised(np, scaled, p).sum(axis=-1)

        return self._reduced(x, of_wide, np.add, batched, divisor, separate=p == 2)

    def largest(self, x: HostArray, *, batched: bool = False) -> Any:
        return self._reduced(x, lambda wide, _: np.abs(wide).max(axis=-1), np.maximum, batched)

    def smallest(self, x: HostArray, *, batched: bool = False) -> Any:
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
        magnitudes = np.concatenate([widened(chunk, x.dtype) for chunk in x.chunks()])
        return int(np.isnan(magnitudes).sum()), int(np.isinf(magnitudes).sum())

    # Results

    def without_nonfinite(self, x: HostArray) -> HostArray:
        copy = x.copy()
        wide = widened(copy.data, copy.dtype)
        copy.data[~np.isfinite(wide)] = 0
        return copy

    def shrink(self, x: HostArray, coefficient: Any) -> HostArray:
        result = x.copy()
        self.shrink_(result, coefficient)
        return result

    def shrink_(self, x: HostArray, coefficient: Any) -> None:
        """Scale `x` where it is; write nothing if the coefficient keeps it."""
        if coefficient.keep:
            return
        if coefficient.blank:
            x.data[...] = 0
            return
        for part in x.parts():
            target = format_of(part)
            for chunk in part.chunks("readwrite"):
                product = widened(chunk, part.dtype) * coefficient.factor
                if coefficient.second is not None:
                    product *= coefficient.second
                chunk[...] = narrowed(product, target)

    def weighted_sum(self, x: HostArray, coefficient: Any) -> np.ndarray:
        weight = np.where(coefficient.keep, 1.0, coefficient.factor)
        sums = []
        for part in x.parts():
            total = np.zeros(math.prod(x.shape[1:]))
            for block, rows in part.rows():
                wide = widened(rows, part.dtype) * weight[block, None]
                if coefficient.second is not None:
                    wide *= coefficient.second[block, None]
                wide[coefficient.blank[block]] = 0.0
                total += wide.sum(axis=0)
            sums.append(total.reshape(x.shape[1:]))
        return sums[0] if len(sums) == 1 else sums[0] + 1j * sums[1]

    def clamped(self, prepared: Any, leaf: Any, bound: float) -> Any:
        """Return the leaf, prepared, with each element in [-bound, bound]."""
        with self.precision():
            return self.leave(self.clamp(self.enter(prepared), bound), leaf)

    def clamp(self, x: HostArray, bound: float) -> HostArray:
        result = x.copy()
        self.clamp_(result, bound)
        return result

    def clamp_(self, x: HostArray, bound: float) -> None:
        """Clamp `x` where it is; write only the chunks in which something changes."""
        for chunk in x.chunks("readwrite"):
            wide = widened(chunk, x.dtype)
            if (np.abs(wide) > bound).any():
                chunk[...] = narrowed(np.clip(wide, -bound, bound), format_of(x))


def checked_dtype(array: Any, name: str = "a gradient") -> Any:
    """Return the array. Raises TypeError where its dtype cannot hold clipped gradients."""
    if dtype_name(array) in SUPPORTED:
        return array
    raise TypeError(
        f"{name} has dtype {dtype_name(array)}, which cannot be clipped; convert it to one of {', '.join(SUPPORTED)}."
    )


def sum_dtype(x: Any, wide: Any) -> str:
    """Return the dtype in which a sum over examples of `x` is handed out."""
    precise = format_of(x).precision == 53
    if "complex" in dtype_name(wide):
        return "complex128" if precise else "complex64"
    return "float64" if precise else "float32"


def backend(leaves: Sequence[Any], scalars: Sequence[Any]) -> Host:
    """Return the backend for NumPy arrays."""
    return HOST


HOST = Host()
