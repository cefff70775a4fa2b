"""Views of arrays in host memory: described to the kernels if they are dense, or read in chunks. New aligned memory."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import (
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
from gradclip._src.core.layouts import Scope
from gradclip._src.native import Described, describe_buffers

_CHUNK = 1 << 15  # elements: 256 KiB in float64, small enough for the cache
ALIGNMENT = 64  # bytes; frameworks can take over memory that starts at a multiple, without a copy
_BITS = {FLOAT32: np.int32, FLOAT64: np.int64}


@dataclass(eq=False, slots=True)  # not frozen: frozen ones take three times as long to create
class HostArray:
    """An array in host memory. A bfloat16 array, which NumPy does not support, is stored as its 16-bit integers.

    If `counted` is given, chunks have zeros wherever `counted` is non-finite. It is the array itself, or the complex
    array that this one is a part of.
    """

    data: np.ndarray
    dtype: str
    origin: Any = None  # the immutable array that owns the memory, if any
    counted: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.data.shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.data.size

    @classmethod
    def of(cls, data: np.ndarray) -> "HostArray":
        """Return a view of a NumPy array, including arrays with the bfloat16 of ml_dtypes."""
        name = dtype_name(data)
        return cls(data.view(np.uint16) if name == BFLOAT16.name else data, name)

    def parts(self) -> "list[HostArray]":
        """Return views of the real and imaginary parts, or the array itself if it is real."""
        if not is_complex(self):
            return [self]
        real = format_of(self).name
        return [HostArray(part, real, counted=self.counted) for part in (self.data.real, self.data.imag)]

    def numbers(self) -> np.ndarray:
        """Return the elements as a flat float64 copy."""
        return widened(self.data.reshape(-1), self.dtype)

    def only_finite(self) -> "HostArray":
        """Return a view whose chunks have zeros in place of NaN and infinities."""
        return HostArray(self.data, self.dtype, counted=self.data)

    def quartered(self) -> "HostArray":
        """Return the array times 0.25, in the widest format."""
        data = self.data if self.counted is None else self._zeroed(self.data, self.counted)
        wide = as_float(data, self.dtype).astype(np.complex128 if is_complex(self) else np.float64)
        for part in (wide.real, wide.imag) if is_complex(self) else (wide,):
            # Part by part, because a complex infinity times 0.25 gets NaN in its other part.
            part *= 0.25
        return HostArray.of(wide)

    def put_zeros(self) -> None:
        """Replace NaN and infinities by zeros in place."""
        for chunk in self.chunks("readwrite"):
            finite = is_finite(chunk, self.dtype)
            # Write only chunks with a non-finite element: memory access is what takes time.
            if not finite.all():
                chunk[~finite] = 0

    def copy(self) -> "HostArray":
        """Return a copy with the same memory order."""
        return HostArray(self.data.copy(order="K"), self.dtype)

    def chunks(self, access: Literal["readonly", "readwrite"] = "readonly") -> Iterator[np.ndarray]:
        """Yield 1-D chunks that cover the whole real array, in memory order."""
        # Setting up `np.nditer` takes ten times as long as this view, which is too slow for small arrays.
        if self.counted is None and self.size <= _CHUNK and self.data.flags.c_contiguous:
            yield self.data.reshape(-1)
            return
        operands = [self.data] if self.counted is None else [self.data, self.counted]
        with np.nditer(
            operands,
            flags=["external_loop", "buffered", "zerosize_ok"],  # the last one allows arrays without elements
            op_flags=[[access]] * len(operands),
            buffersize=_CHUNK,
            order="K",  # memory order, the fastest to read
        ) as pieces:
            yield from pieces if self.counted is None else (self._zeroed(*pair) for pair in pieces)

    def rows(self, own: tuple[int, ...] = (0,)) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield blocks of whole rows: a slice with the row numbers, and a 2-D array of the rows.

        A row contains the elements that share a norm: those at one position along the `own` axes. With only the first
        axis in `own`, a row is an example.
        """
        data = rows_first(self.data, own)
        counted = None if self.counted is None else rows_first(self.counted, own)
        beside = math.prod(data.shape[1 : len(own)])  # rows at each position along the first axis
        length = math.prod(data.shape[max(1, len(own)) :])
        for block in blocks_of(data):
            # NumPy's order of additions depends on strides. Contiguous rows make a row's sum independent of them.
            rows = np.ascontiguousarray(data[block])
            rows = rows.reshape(len(rows) * beside, length)
            some = slice(block.start * beside, block.stop * beside)
            yield some, rows if counted is None else self._zeroed(rows, counted[block].reshape(rows.shape))

    def _zeroed(self, piece: np.ndarray, beside: np.ndarray) -> np.ndarray:
        """Return a chunk with zeros wherever `beside` is non-finite."""
        name = BFLOAT16.name if self.dtype == BFLOAT16.name else bare_name(beside.dtype)
        return np.where(is_finite(beside, name), piece, np.zeros((), piece.dtype))


class HostArrays(Arrays):
    """Arrays in host memory. Arrays that the kernels can read get a NumPy view only if something else needs it."""

    laid: Any = None  # the last layout of several norms, and the arrays as the kernels see them for it

    def __init__(self, sources: Sequence[Any], view: Callable[[Any], HostArray], described: Described) -> None:
        self._view = view
        self.kernels, self.left_out = described
        self.others = [view(sources[index]) for index in self.left_out]
        known = self.kernels.dtypes if self.kernels else ()
        super().__init__(sources, (*known, *(x.dtype for x in self.others)))

    @cached_property
    def items(self) -> list[HostArray]:
        """The arrays as views."""
        return list(map(self._view, self._given))

    def elements(self) -> int:
        """Return the number of elements."""
        known = self.kernels.count if self.kernels else 0
        return known + sum(x.size for x in self.others)


class OnlyFinite(HostArrays):
    """Arrays whose NaN and infinities count as zeros. The kernels cannot read them."""

    def __init__(self, arrays: Sequence[HostArray]) -> None:
        views = [x.only_finite() for x in arrays]
        super().__init__(views, lambda x: x, Described(None, range(len(views))))


def split(arrays: Arrays, scope: Scope | None = None) -> tuple[Any, Sequence[HostArray]]:
    """Return the arrays' description for the kernels (or None), and the arrays that the kernels cannot read.

    The kernels support only norms of all elements together. For any other scope, all arrays are in the second result.
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
    """Return a view with the `own` axes first. Without own axes, the whole array is one row."""
    if not own:
        return data[None]
    return data.transpose(*own, *(axis for axis in range(data.ndim) if axis not in own))


def as_columns(data: np.ndarray, own: tuple[int, ...]) -> np.ndarray | None:
    """Return a 2-D view with all own axes merged into the second, or None unless they are last in a C-ordered array."""
    shared = data.ndim - len(own)
    if not (own and shared and data.size and data.flags.c_contiguous) or own != tuple(range(shared, data.ndim)):
        return None
    return data.reshape(-1, math.prod(data.shape[shared:]))


def blocks_of(rows: np.ndarray) -> Iterator[slice]:
    """Yield slices of the first axis with about as many elements as a chunk, and at least one row."""
    many = max(1, _CHUNK // max(1, math.prod(rows.shape[1:])))
    for start in range(0, len(rows), many):
        yield slice(start, start + many)


def known_to_buffers(array: np.ndarray) -> np.ndarray:
    """Return the array, but bfloat16 as its bits, because Python's buffer protocol does not support this dtype."""
    return array.view(np.uint16) if array.dtype.kind == "V" else array


def is_finite(data: np.ndarray, dtype: str) -> np.ndarray:
    """Say which elements are finite. For complex numbers, both parts must be."""
    # Only NaN and infinities have all exponent bits of bfloat16 set.
    return (data & 0x7F80) != 0x7F80 if dtype == BFLOAT16.name else np.isfinite(data)


def widened(data: np.ndarray, dtype: str) -> np.ndarray:
    """Return the elements, or the magnitudes of complex ones, as a float64 copy."""
    if data.dtype.kind == "c":
        # Unlike the square root of a sum of squares, `hypot` does not overflow or underflow on the way.
        return np.hypot(data.real.astype(np.float64), data.imag.astype(np.float64))
    return as_float(data, dtype).astype(np.float64)


def multiplied(
    data: np.ndarray, dtype: str, product_format: Format, first: np.ndarray | float, second: np.ndarray | float | None
) -> np.ndarray:
    """Return real elements times two factors, moved one step toward zero if below the format's normal range."""
    product = as_float(data, dtype).astype(product_format.name, copy=False) * first
    if second is not None:
        product *= second
    # There, rounding to nearest may exceed the exact product by up to half a step. Zeros keep their sign.
    small = np.abs(product) < product_format.tiny
    if small.any():
        product[small] = np.nextafter(product[small], product[small] * 0)
    return product


def narrowed(x: np.ndarray, target: Format) -> np.ndarray:
    """Return float32 or float64 numbers in the target format (bfloat16 as its bits), rounded toward zero."""
    source = format_of(x)
    if source is target:
        return x
    # NumPy rounds to nearest, which may round up. With the low bits cleared, the conversion below is exact.
    cut = (x.view(_BITS[source]) & low_bits_mask(source, target)).view(x.dtype)
    small = np.abs(x) < target.tiny
    if target.min_exponent > source.min_exponent and small.any():
        # Below the target's normal range the mask keeps too many bits.
        cut[small] = np.trunc(x[small] / target.step) * target.step
    if target is BFLOAT16:
        # bfloat16 is the upper half of a float32. The lower half is already zero.
        return (cut.astype(np.float32, copy=False).view(np.uint32) >> 16).astype(np.uint16)
    return cut.astype(target.name)


def as_float(data: np.ndarray, dtype: str) -> np.ndarray:
    """Return the numbers unchanged, but bfloat16 as float32."""
    return (data.astype(np.uint32) << 16).view(np.float32) if dtype == BFLOAT16.name else data


def wide_chunks(x: HostArray) -> Iterator[np.ndarray]:
    """Yield the elements, or the magnitudes of complex ones, in float64 chunks."""
    for chunk in x.chunks():
        yield widened(chunk, x.dtype)


def aligned_empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return a new aligned array with arbitrary values."""
    size = np.dtype(dtype).itemsize * math.prod(shape)
    # NumPy aligns to 16 bytes, so allocate extra bytes to reach the next multiple of 64.
    memory = np.empty(size + ALIGNMENT, np.uint8)
    return np.ndarray(tuple(shape), dtype, memory, -_address(memory) % ALIGNMENT)


def is_aligned(array: np.ndarray) -> bool:
    """Say whether an array is aligned like those of `aligned_empty`."""
    return _address(array) % ALIGNMENT == 0


def _address(array: np.ndarray) -> int:
    # `ctypes` would take five times as long.
    return int(array.__array_interface__["data"][0])
