"""safetensors: its own library reads and checks the header. Arrays follow one another, so that it gives their places.

https://github.com/huggingface/safetensors#format
"""

import math

from gradclip._src.updates.files.arrays import FileArray, PlainBytes, read_by
from gradclip._src.updates.files.dtypes import Dtype
from gradclip._src.updates.files.layout import MemoryLayout
from gradclip._src.updates.files.source import Source
from gradclip._src.updates.files.stored import shown

_LENGTH = 8  # bytes
MOST_BYTES = 1 << 24  # of a header
_INTEGERS = {
    f"{sign}{bits}": f"{kind}{bits}" for sign, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
}
_NAMES = {
    **_INTEGERS,
    "BOOL": "bool",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


def read(source: Source) -> list[FileArray]:
    """Return the arrays of a file."""
    length = int.from_bytes(source.start(_LENGTH), "little")
    if length > MOST_BYTES and _LENGTH + length <= source.size:
        source.refuse(f"its header has {length} bytes. gradclip reads at most {MOST_BYTES}.")
    with read_by("safetensors", source) as path:
        from safetensors import safe_open

        with safe_open(path, framework="numpy") as file:
            found = {name: file.get_slice(name) for name in file.offset_keys()}
            described = [(name, one.get_dtype(), tuple(one.get_shape())) for name, one in found.items()]
    start, arrays = _LENGTH + length, []
    for name, dtype, shape in described:
        if dtype not in _NAMES:
            source.refuse(f"'{shown(name)}' has the dtype {shown(dtype)}, which norms do not support.")
        kind = Dtype.named(_NAMES[dtype])
        size = math.prod(shape) * kind.raw.itemsize
        arrays.append(FileArray(name, kind, MemoryLayout.c_order(shape), PlainBytes(source, start, size)))
        start += size
    return arrays
