"""The dtypes of arrays in files: how the bytes of one are read as numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from gradclip._src.core.formats import SUPPORTED

_FLOAT8 = {  # bits of the exponent, its bias, and which NaN and infinities there are
    "float8_e4m3fn": (4, 7, "fn"),
    "float8_e5m2": (5, 15, "ieee"),
    "float8_e4m3fnuz": (4, 8, "fnuz"),
    "float8_e5m2fnuz": (5, 16, "fnuz"),
}
COUNTED = frozenset((*SUPPORTED, *_FLOAT8))
_OF_8_BITS = 256


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype in a file: its bare name, and the NumPy dtype as which its bytes are read."""

    name: str
    raw: np.dtype

    @classmethod
    @cache  # one object for all arrays of a file
    def named(cls, name: str) -> "Dtype":
        """Return a dtype by the name that it has in PyTorch and NumPy, in little-endian order."""
        if name == "bfloat16" or name.startswith("float8"):
            return cls(name, np.dtype(np.uint16 if name == "bfloat16" else np.uint8))
        try:
            return cls(name, np.dtype(name).newbyteorder("<"))
        except TypeError:  # what NumPy does not know, no norm supports
            return cls(name, np.dtype(np.uint8))

    @classmethod
    def of(cls, dtype: np.dtype) -> "Dtype":
        """Return a NumPy dtype as a dtype of files."""
        return cls(dtype.name, dtype)

    @property
    def counts(self) -> bool:
        """Whether its numbers are measured. Others are never read."""
        return self.name in COUNTED

    @property
    def converts(self) -> bool:
        """Whether `numbers` gives new arrays, and not views of the bytes."""
        return self.name in _FLOAT8 or not self.raw.isnative

    def numbers(self) -> "tuple[str, Callable[[np.ndarray], np.ndarray]]":
        """Return the dtype of the numbers, and how a flat array of the raw dtype becomes one of them.

        Its memory may be used again for the next array.
        """
        if self.name in _FLOAT8:
            return "float32", _by_table(float8_table(self.name))
        if not self.raw.isnative:
            return self.name, lambda raw: raw.astype(raw.dtype.newbyteorder("="))
        return self.name, lambda raw: raw


def _by_table(table: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    memory = np.empty(0, table.dtype)

    def numbers(raw: np.ndarray) -> np.ndarray:
        nonlocal memory
        if raw.size > memory.size:
            memory = np.empty(raw.size, table.dtype)
        # No index is out of range. With another mode, NumPy would copy the result.
        return np.take(table, raw, out=memory[: raw.size], mode="clip")

    return numbers


@cache
def float8_table(name: str) -> np.ndarray:
    """Return the number of each byte in a format of 8 bits, as float32."""
    exponent_bits, bias, special = _FLOAT8[name]
    fraction_bits = 7 - exponent_bits
    byte = np.arange(_OF_8_BITS)
    exponent, fraction = (byte & 0x7F) >> fraction_bits, byte & ((1 << fraction_bits) - 1)
    significand = np.where(exponent > 0, 1 << fraction_bits, 0) + fraction
    values = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - bias - fraction_bits)
    if special == "ieee":
        top = exponent == (1 << exponent_bits) - 1
        values[top] = np.where(fraction[top] == 0, np.inf, np.nan)
    if special == "fn":
        values[(byte & 0x7F) == 0x7F] = np.nan
    values[byte >= _OF_8_BITS // 2] *= -1
    if special == "fnuz":
        values[_OF_8_BITS // 2] = np.nan
    return values.astype(np.float32)
