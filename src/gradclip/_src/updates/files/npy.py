""".npy: a magic number, a header that is a Python literal, and one array.

https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

import ast
import math
import re
import warnings
from dataclasses import dataclass

import numpy as np

from gradclip._src.updates.files.dtypes import Dtype
from gradclip._src.updates.files.layout import MemoryLayout
from gradclip._src.updates.files.stored import shown

MAGIC = b"\x93NUMPY"
LONGEST = 12 + 10_000  # bytes of the start and the header, as NumPy's own limit
_MOST_AXES = 64
_MOST_ELEMENTS = 1 << 62
_KEYS = {"descr", "fortran_order", "shape"}


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says: dtype, layout, and at which byte the array starts."""

    kind: Dtype
    layout: MemoryLayout
    start: int

    @property
    def size(self) -> int:
        """The number of bytes of the array."""
        return self.layout.size * self.kind.raw.itemsize


def header_of(start: bytes) -> Header:
    """Read a header from the first bytes of an array's file. Raises ValueError, which says what is wrong."""
    if not start.startswith(MAGIC):
        raise ValueError("it does not start as an .npy file does.")
    version = tuple(start[6:8])
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"its .npy version is {shown(version)}; known are (1, 0), (2, 0) and (3, 0).")
    width = 2 if version == (1, 0) else 4
    length = int.from_bytes(start[8 : 8 + width], "little")
    first = 8 + width
    if length > LONGEST - 12:
        raise ValueError(f"its .npy header promises {length} bytes; at most {LONGEST - 12} are read.")
    if first + length > len(start):
        raise ValueError(f"its .npy header promises {length} bytes, but the file ends before. It is cut off.")
    text = start[first : first + length].decode("utf-8" if version == (3, 0) else "latin1", "strict")
    fields = _literal(text)
    if not isinstance(fields, dict) or fields.keys() != _KEYS:
        raise ValueError("its .npy header must have the keys descr, fortran_order and shape, each once.")
    dtype, shape = _dtype(fields["descr"]), _shape(fields["shape"])
    if not isinstance(fields["fortran_order"], bool):
        raise ValueError(f"its .npy header has fortran_order {shown(repr(fields['fortran_order']))}, not a boolean.")
    order = MemoryLayout.fortran_order if fields["fortran_order"] else MemoryLayout.c_order
    return Header(Dtype.of(dtype), order(shape), first + length)


def _literal(text: str) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings
            try:
                tree = ast.parse(text.strip(), mode="eval")
            except SyntaxError:
                # Python 2 wrote long integers with an L.
                tree = ast.parse(re.sub(r"(?<=\d)L\b", "", text.strip()), mode="eval")
            keys = [key.value for key in getattr(tree.body, "keys", []) if isinstance(key, ast.Constant)]
            if len(keys) > len(set(keys)):
                raise ValueError("its .npy header has a key more than once.")
            return ast.literal_eval(tree)
    except (SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError("its .npy header is no Python literal. It is damaged.") from None


def _dtype(description: object) -> np.dtype:
    try:
        dtype = np.lib.format.descr_to_dtype(description)  # type: ignore[arg-type]
    except Exception as error:  # NumPy raises whatever the description leads to
        raise ValueError(f"its .npy header has the dtype {shown(repr(description))}: {shown(error)}.") from None
    if dtype.hasobject:
        raise ValueError(
            "it holds Python objects, which are pickled. gradclip reads no pickles: they could run code. "
            "Save an array of numbers."
        )
    return dtype


def _shape(shape: object) -> tuple[int, ...]:
    if (
        not isinstance(shape, tuple)
        or len(shape) > _MOST_AXES
        or not all(type(n) is int and n >= 0 for n in shape)
        or math.prod(n for n in shape if n) > _MOST_ELEMENTS
    ):
        raise ValueError(f"its .npy header has the shape {shown(repr(shape))}, not a tuple of integers >= 0.")
    return shape
