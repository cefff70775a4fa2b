"""Views of arrays in host memory, piece by piece, and their numbers in float64 and back."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gradclip.backends.formats import BFLOAT16, FLOAT64, Format, dtype_name, format_of, is_complex
from gradclip.backends.portable import low_bits_mask

_CHUNK = 1 << 15


@dataclass(frozen=True)
class HostArray:
    """An array in host memory. A bfloat16 one, which NumPy does not know, is held as its 16 bits."""

    data: np.ndarray
    dtype: str
    origin: Any = None  # the immutable array whose memory this is, where there is one

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
        return [HostArray(self.data.real, real), HostArray(self.data.imag, real)]

    def copy(self) -> "HostArray":
        """Return a copy in the same memory order."""
        return HostArray(self.data.copy(order="K"), self.dtype)

    def chunks(self, access: Literal["readonly", "readwrite"] = "readonly") -> Iterator[np.ndarray]:
        """Yield 1-D pieces of the real array, together all of it, in memory order."""
        if self.size <= _CHUNK and self.data.flags.c_contiguous:
            yield self.data.reshape(-1)
            return
        with np.nditer(  # type: ignore[call-overload]
            self.data,
            flags=["external_loop", "buffered", "zerosize_ok"],
            op_flags=[[access]],
            buffersize=_CHUNK,
            order="K",
        ) as pieces:
            yield from pieces

    def rows(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield blocks of whole examples, as slices of the first axis and 2-D arrays."""
        length = math.prod(self.shape[1:])
        flat = self.data.reshape(len(self.data), length)
        many = max(1, _CHUNK // max(1, length))
        for start in range(0, len(flat), many):
            block = slice(start, start + many)
            yield block, flat[block]


def widened(data: np.ndarray, dtype: str) -> np.ndarray:
    """Return a float64 copy of the elements, of complex ones their magnitudes."""
    if dtype == BFLOAT16.name:
        return (data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if data.dtype.kind == "c":
        return np.hypot(data.real.astype(np.float64), data.imag.astype(np.float64))
    return data.astype(np.float64)


def narrowed(wide: np.ndarray, target: Format) -> np.ndarray:
    """Return float64 numbers in the target format (bfloat16 as its bits), rounded toward zero; may overwrite them."""
    small = np.abs(wide) < target.tiny
    any_small = small.any()
    if target.precision == 53:
        if any_small:
            wide[small] = 0.0
        return wide
    if any_small:
        below_normal = np.trunc(wide[small] / target.step) * target.step
    bits = wide.view(np.int64)
    bits &= low_bits_mask(FLOAT64, target)
    if any_small:
        wide[small] = below_normal
    if target is BFLOAT16:
        return (wide.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return wide.astype(target.name)
