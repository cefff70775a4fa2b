"""safetensors: a length, a header in JSON that says where each array lies, and the arrays. Also its index of shards.

https://github.com/huggingface/safetensors#format
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import PurePosixPath, PureWindowsPath

from gradclip._src.updates.files import strict_json
from gradclip._src.updates.files.arrays import FileArray, PlainBytes
from gradclip._src.updates.files.dtypes import Dtype
from gradclip._src.updates.files.layout import MemoryLayout
from gradclip._src.updates.files.source import Source
from gradclip._src.updates.files.stored import shown
from gradclip._src.words import listed

_LENGTH = 8  # bytes
_MOST_AXES = 64  # as in NumPy
_MOST_ELEMENTS = 1 << 62
_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
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
    """Return the arrays of a file. Raises FileError unless they fill the file without gaps and overlaps."""
    length = int.from_bytes(source.start(_LENGTH), "little")
    start = _LENGTH + length
    if start > source.size:
        source.refuse(f"its header promises {length} bytes, and the file has {source.size}. It is cut off, or damaged.")
    if length > strict_json.MOST_BYTES:
        source.refuse(f"its header has {length} bytes. gradclip reads at most {strict_json.MOST_BYTES}.")
    text = source.bytes_at(_LENGTH, length)
    if not text.startswith(b"{"):
        source.refuse("its header does not start with '{', so it is no safetensors file, or damaged.")
    try:
        header = strict_json.parse(text)
        entries = _entries(header)
        # Each entry goes before the next array comes: 100,000 of both would take twice the memory.
        found = [_array(source, start, name, entries.pop(name)) for name in list(entries)]
        _check_places(found, source.size - start, start)
    except ValueError as error:
        source.refuse(str(error))
    return found


def read_index(source: Source, enter: ExitStack, progress: Callable[[int], object] | None) -> list[FileArray]:
    """Return the arrays of all shards that an index names. The shards lie beside it."""
    try:
        index = strict_json.parse(source.bytes_at(0, min(source.size, strict_json.MOST_BYTES + 1)))
        places = _weight_map(index)
    except ValueError as error:
        source.refuse(str(error))
    found: dict[str, FileArray] = {}
    for shard in dict.fromkeys(places.values()):
        part = enter.enter_context(Source(source.path.with_name(shard), progress))
        arrays = {x.name: x for x in read(part)}
        expected = {name for name, place in places.items() if place == shard}
        for names, what in ((expected - arrays.keys(), "lacks"), (arrays.keys() - expected, "also has")):
            if names:
                part.refuse(f"it {what} {listed([shown(x) for x in sorted(names)])}, unlike what its index says.")
        found |= arrays
    return [found[name] for name in places]


def _entries(header: object) -> dict[str, object]:
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object.")
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(x, str) for x in metadata.values())):
        raise ValueError("its __metadata__ is no object of strings.")
    return header


def _array(source: Source, start: int, name: str, entry: object) -> FileArray:
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"'{shown(name)}' lacks a dtype, a shape or data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _NAMES:
        raise ValueError(f"'{shown(name)}' has the dtype {shown(repr(dtype))}, which gradclip does not know.")
    if not strict_json.are_naturals(shape) or len(shape) > _MOST_AXES:
        raise ValueError(f"'{shown(name)}' has the shape {shown(repr(shape))}, not a list of integers >= 0.")
    if not strict_json.are_naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"'{shown(name)}' has the data_offsets {shown(repr(offsets))}, not two integers >= 0.")
    kind, (first, end) = Dtype.named(_NAMES[dtype]), offsets
    elements = math.prod(shape)
    if max(elements, math.prod(n for n in shape if n)) > _MOST_ELEMENTS or first > end:
        raise ValueError(f"'{shown(name)}' has the impossible shape {shown(repr(shape))}, or ends before it starts.")
    if elements * kind.raw.itemsize != end - first:
        raise ValueError(
            f"'{shown(name)}' of dtype {dtype} and shape {shown(repr(shape))} takes {elements * kind.raw.itemsize} "
            f"bytes, but its data_offsets give it {end - first}."
        )
    return FileArray(name, kind, MemoryLayout.c_order(tuple(shape)), PlainBytes(source, start + first, end - first))


def _check_places(arrays: list[FileArray], size: int, start: int) -> None:
    """Check that arrays follow one another without gaps up to the end of the file."""
    end = 0
    for one in sorted(arrays, key=lambda x: (x.stored.offset, x.stored.size)):  # type: ignore[attr-defined]
        place: PlainBytes = one.stored  # type: ignore[assignment]
        if place.offset - start != end:
            what = "overlaps the array before it" if place.offset - start < end else "leaves a gap before it"
            raise ValueError(f"'{shown(one.name)}' {what}: it starts at byte {place.offset - start}, expected {end}.")
        end += place.size
    if end != size:
        raise ValueError(
            f"its header promises {end} bytes of arrays, and the file holds {size}. It is cut off, or damaged."
        )


def _weight_map(index: object) -> dict[str, str]:
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise ValueError("it is JSON without a weight_map of names to shards, so no index of safetensors.")
    for name in set(places.values()):
        if name in ("", ".", "..") or "\0" in name or {PurePosixPath(name).name, PureWindowsPath(name).name} != {name}:
            raise ValueError(f"its weight_map names '{shown(name)}'. Shards must lie beside the index, in its folder.")
    return places
