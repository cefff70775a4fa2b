"""Views of arrays in host memory: described to the kernels where they lie dense, or taken piece by piece."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from gradclip.backends.arrays import Arrays
from gradclip.backends.formats import (
    BFLOAT16,
    FLOAT32,
    FLOAT64,
    Format,
    bare_name,
    dtype_name,
    format_of,
    is_complex,
    low_bits_mask,
)
from gradclip.backends.values import Scope
from gradclip.native import Described, describe_buffers

_CHUNK = 1 << 15  # elements: 256 KiB in float64, little enough to stay in cache
_BITS = {FLOAT32: np.int32, FLOAT64: np.int64}


@dataclass(eq=False, slots=True)  # not frozen: that would take three times as long to make
class HostArray:
    """An array in host memory. A bfloat16 one, which NumPy does not know, is held as its 16 bits.

    Where `counted` is given, the pieces have zeros where that is not finite. It is the array itself, or the complex
    array that this one is a part of.
    """

    data: np.ndarray
    dtype: str
    origin: Any = None  # the immutable array whose memory this is, where there is one
    counted: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, as of any array."""
        return self.data.shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.data.size

    @classmethod
    def of(cls, data: np.ndarray) -> "HostArray":
        """Return a view of a NumPy array (of one of ml_dtypes' bfloat16 too)."""
        name = dtype_name(data)
        return cls(data.view(np.uint16) if name == BFLOAT16.name else data, name)

    def parts(self) -> "list[HostArray]":
        """Return views of the real and imaginary part, or this array alone."""
        if not is_complex(self):
            return [self]
        real = format_of(self).name
        return [HostArray(part, real, counted=self.counted) for part in (self.data.real, self.data.imag)]

    def numbers(self) -> np.ndarray:
        """Return a float64 copy of the elements, flat."""
        return widened(self.data.reshape(-1), self.dtype)

    def only_finite(self) -> "HostArray":
        """Return a view that has zeros for NaN and the infinities in its pieces."""
        return HostArray(self.data, self.dtype, counted=self.data)

    def quartered(self) -> "HostArray":
        """Return a quarter of the array, in the widest format."""
        data = self.data if self.counted is None else self._zeroed(self.data, self.counted)
        wide = as_float(data, self.dtype).astype(np.complex128 if is_complex(self) else np.float64)
        for part in (wide.real, wide.imag) if is_complex(self) else (wide,):
            # Part by part: a complex infinity times 0.25 has a NaN in its other part.
            part *= 0.25
        return HostArray.of(wide)

    def put_zeros(self) -> None:
        """Write zeros over NaN and the infinities."""
        for chunk in self.chunks("readwrite"):
            finite = is_finite(chunk, self.dtype)
            # Only chunks that hold such an element are written: memory is what takes the time.
            if not finite.all():
                chunk[~finite] = 0

    def copy(self) -> "HostArray":
        """Return a copy in the same memory order."""
        return HostArray(self.data.copy(order="K"), self.dtype)

    def chunks(self, access: Literal["readonly", "readwrite"] = "readonly") -> Iterator[np.ndarray]:
        """Yield 1-D pieces of the real array, together all of it, in memory order."""
        # To set `np.nditer` up takes ten times as long as this view, too long for small arrays.
        if self.counted is None and self.size <= _CHUNK and self.data.flags.c_contiguous:
            yield self.data.reshape(-1)
            return
        operands = [self.data] if self.counted is None else [self.data, self.counted]
        with np.nditer(
            operands,
            flags=["external_loop", "buffered", "zerosize_ok"],  # without the last, no elements are an error
            op_flags=[[access]] * len(operands),
            buffersize=_CHUNK,
            order="K",  # the order in memory, the fastest to read
        ) as pieces:
            yield from pieces if self.counted is None else (self._zeroed(*pair) for pair in pieces)

    def rows(self, own: tuple[int, ...] = (0,)) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield blocks of whole rows: a slice that says which rows these are, and a 2-D array of them.

        A row holds the elements that share a norm: those at one place along the `own` axes. With the first axis for
        `own`, a row is an example.
        """
        data = rows_first(self.data, own)
        counted = None if self.counted is None else rows_first(self.counted, own)
        beside = math.prod(data.shape[1 : len(own)])  # rows at each place along the first axis
        length = math.prod(data.shape[max(1, len(own)) :])
        for block in blocks_of(data):
            # NumPy adds in an order that depends on strides: so that a row's sum does not, each row lies in one piece.
            rows = np.ascontiguousarray(data[block])
            rows = rows.reshape(len(rows) * beside, length)
            some = slice(block.start * beside, block.stop * beside)
            yield some, rows if counted is None else self._zeroed(rows, counted[block].reshape(rows.shape))

    def _zeroed(self, piece: np.ndarray, beside: np.ndarray) -> np.ndarray:
        """Return a piece, zeros where `beside` is not finite."""
        name = BFLOAT16.name if self.dtype == BFLOAT16.name else bare_name(beside.dtype)
        return np.where(is_finite(beside, name), piece, np.zeros((), piece.dtype))


class HostArrays(Arrays):
    """Arrays in host memory. Views of those that the kernels know are made only if something else asks for them."""

    def __init__(self, sources: Sequence[Any], view: Callable[[Any], HostArray], described: Described) -> None:
        self._view = view
        self.kernels, self.left_out = described
        self.others = [view(sources[index]) for index in self.left_out]
        known = self.kernels.dtypes if self.kernels else ()
        super().__init__(sources, (*known, *(x.dtype for x in self.others)))

    @cached_property
    def items(self) -> list[HostArray]:
        """The arrays one by one."""
        return list(map(self._view, self._given))

    def elements(self) -> int:
        """Return the number of elements."""
        known = self.kernels.count if self.kernels else 0
        return known + sum(x.size for x in self.others)


class OnlyFinite(HostArrays):
    """Arrays whose NaN and infinities count as zeros. The kernels do not know them."""

    def __init__(self, arrays: Sequence[HostArray]) -> None:
        views = [x.only_finite() for x in arrays]
        super().__init__(views, lambda x: x, Described(None, range(len(views))))


def split(arrays: Arrays, scope: Scope | None = None) -> tuple[Any, Sequence[HostArray]]:
    """Return what the kernels know of the arrays (None for nothing), and the arrays that they do not know.

    They only know norms of all elements together. For any other scope they know nothing.
    """
    if (scope is not None and not scope.whole) or not isinstance(arrays, HostArrays) or not arrays.kernels:
        return None, arrays
    return arrays.kernels, arrays.others


def viewed_arrays(arrays: Sequence[HostArray]) -> HostArrays:
    """Return the arrays, described to the kernels."""
    if any(x.counted is not None for x in arrays):
        return OnlyFinite(arrays)
    return HostArrays(arrays, lambda x: x, describe_buffers([x.data for x in arrays]))


def rows_first(data: np.ndarray, own: tuple[int, ...]) -> np.ndarray:
    """Return a view with the own axes before the others. Without own axes the whole array is one row."""
    if not own:
        return data[None]
    return data.transpose(*own, *(axis for axis in range(data.ndim) if axis not in own))


def as_columns(data: np.ndarray, own: tuple[int, ...]) -> np.ndarray | None:
    """Return a view of two axes, the last of all own axes; None where these are not the last of an array in order."""
    shared = data.ndim - len(own)
    if not (own and shared and data.size and data.flags.c_contiguous) or own != tuple(range(shared, data.ndim)):
        return None
    return data.reshape(-1, math.prod(data.shape[shared:]))


def blocks_of(rows: np.ndarray) -> Iterator[slice]:
    """Yield slices of the first axis, of about as many elements as a chunk has, one row at least."""
    many = max(1, _CHUNK // max(1, math.prod(rows.shape[1:])))
    for start in range(0, len(rows), many):
        yield slice(start, start + many)


def known_to_buffers(array: np.ndarray) -> np.ndarray:
    """Return the array; one of bfloat16 as its bits, because Python's buffers do not know this dtype."""
    return array.view(np.uint16) if array.dtype.kind == "V" else array


def is_finite(data: np.ndarray, dtype: str) -> np.ndarray:
    """Say which elements, of complex numbers both parts, are finite."""
    # All bits of bfloat16's exponent are set in NaN and the infinities, and in nothing else.
    return (data & 0x7F80) != 0x7F80 if dtype == BFLOAT16.name else np.isfinite(data)


def widened(data: np.ndarray, dtype: str) -> np.ndarray:
    """Return a float64 copy of the elements, or of the magnitudes of complex ones."""
    if data.dtype.kind == "c":
        # Unlike the root of a sum of squares, `hypot` neither overflows nor underflows on the way.
        return np.hypot(data.real.astype(np.float64), data.imag.astype(np.float64))
    return as_float(data, dtype).astype(np.float64)


def multiplied(
    data: np.ndarray, dtype: str, product_format: Format, first: np.ndarray | float, second: np.ndarray | float | None
) -> np.ndarray:
    """Return real elements times two factors, one step nearer zero where that is below the format's normal range."""
    product = as_float(data, dtype).astype(product_format.name, copy=False) * first
    if second is not None:
        product *= second
    # Rounded to nearest there, a product may be up to half a step larger than the exact one.
    small = np.abs(product) < product_format.tiny
    if small.any():
        product[small] = np.nextafter(product[small], product.dtype.type(0))
    return product


def narrowed(x: np.ndarray, target: Format) -> np.ndarray:
    """Return float32 or float64 numbers in the target format (bfloat16 as its bits), rounded toward zero."""
    source = format_of(x)
    if source is target:
        return x
    # NumPy rounds to nearest, which may be up. Without the low bits the conversion below is exact.
    cut = (x.view(_BITS[source]) & low_bits_mask(source, target)).view(x.dtype)
    small = np.abs(x) < target.tiny
    if target.min_exponent > source.min_exponent and small.any():
        # Below the normal range the target has fewer bits than the mask has left.
        cut[small] = np.trunc(x[small] / target.step) * target.step
    if target is BFLOAT16:
        # bfloat16 is the upper half of a float32. The lower half was cut off above.
        return (cut.astype(np.float32, copy=False).view(np.uint32) >> 16).astype(np.uint16)
    return cut.astype(target.name)


def as_float(data: np.ndarray, dtype: str) -> np.ndarray:
    """Return numbers as they are, those of bfloat16 as float32."""
    return (data.astype(np.uint32) << 16).view(np.float32) if dtype == BFLOAT16.name else data


def wide_chunks(x: HostArray) -> Iterator[np.ndarray]:
    """Yield the elements, complex ones as magnitudes, in float64 pieces."""
    for chunk in x.chunks():
        yield widened(chunk, x.dtype)
