"""TensorBoard's event files, read without TensorFlow.

A file is a sequence of records: the length of the data in 8 bytes, a checksum of these, the data, and its checksum.
Checksums are CRC-32C in 4 bytes. The data is a message of Protocol Buffers, an `Event`: a step, and a `Summary` of
values, each with a tag and a number. PyTorch writes the number as `simple_value`, TensorFlow as a tensor.
"""

import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from gradclip._src.logs.files import opened
from gradclip._src.logs.json_files import no_norm
from gradclip._src.logs.rows import Keys, Log, LogError, Row, bounded, lowered, norm_or_nan

_HEAD = 12  # bytes: the length and its checksum
_LARGEST_RECORD = 2**28
_LARGEST_CHECKED = 2**16  # images and graphs hold no norms
_POLYNOMIAL = 0x82F63B78
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FORMATS = {1: ("<f", 4), 2: ("<d", 8)}  # of TensorFlow's data types


def _table() -> list[int]:
    found = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
        found.append(byte)
    return found


_OF_BYTE = _table()


class Scalar(NamedTuple):
    """A number that was logged: its tag and step."""

    tag: str
    step: int
    value: float


def checksum(data: bytes) -> int:
    """Return the masked CRC-32C of data, as the files hold it."""
    crc, of_byte = 0xFFFFFFFF, _OF_BYTE
    for byte in data:
        crc = (crc >> 8) ^ of_byte[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def is_event_file(start: bytes) -> bool:
    """Say whether a file starts with the head of a record."""
    return len(start) >= _HEAD and struct.unpack("<I", start[8:_HEAD])[0] == checksum(start[:8])


def of_events(paths: Sequence[Path], key: str | None) -> Log:
    """Read event files of one run."""
    cut: list[Path] = []
    tags = Counter(scalar.tag for path in paths for scalar in _scalars(path, cut))
    keys = Keys.among(tags, key)
    if keys is None:
        if cut and not tags:
            raise LogError(f"{cut[0]} is cut off or damaged before its first number.")
        raise no_norm(paths[0], tags, key)
    # Read again instead of keeping all numbers: there may be many tags.
    cut.clear()
    wanted = (keys.norm, keys.loss, keys.max_norm, keys.clipped)
    every = (scalar for path in paths for scalar in _scalars(path, cut) if scalar.tag in wanted)
    scalars = list(bounded(every))
    losses = {scalar.step: scalar.value for scalar in scalars if scalar.tag == keys.loss}
    thresholds = {scalar.step: scalar.value for scalar in scalars if scalar.tag == keys.max_norm}
    after = {scalar.step: scalar.value for scalar in scalars if scalar.tag == keys.clipped}
    norms = [scalar for scalar in scalars if scalar.tag == keys.norm]
    for one in norms:
        threshold = lowered(one.value, after.get(one.step))
        if threshold is not None:
            thresholds.setdefault(one.step, threshold)
    rows = [
        Row(one.step, norm_or_nan(one.value), losses.get(one.step, math.nan), thresholds.get(one.step, math.nan))
        for one in norms
    ]
    notes = tuple(f"{path.name} is cut off or damaged: what could be read of it is used." for path in cut)
    return Log(f"TensorBoard, {keys.norm}", rows, notes=(*notes, *keys.choice(tags)))


def _scalars(path: Path, cut: list[Path]) -> Iterator[Scalar]:
    with opened(path) as file:
        for data in _records(file):
            if data is None:
                cut.append(path)
                return
            yield from scalars_of(data)


def _records(file: IO[bytes]) -> Iterator[bytes | None]:
    """Yield the data of each record; None, and then nothing, where the file is damaged."""
    while head := file.read(_HEAD):
        length = struct.unpack("<Q", head[:8])[0] if is_event_file(head) else _LARGEST_RECORD + 1
        data = file.read(length) if length <= _LARGEST_RECORD else b""
        tail = file.read(4)
        if length > _LARGEST_RECORD or len(data) < length or len(tail) < 4:
            yield None
            return
        if length <= _LARGEST_CHECKED:
            if struct.unpack("<I", tail)[0] != checksum(data):
                yield None
                return
            yield data


def scalars_of(data: bytes) -> list[Scalar]:
    """Return the numbers in an event; none if it is no valid message."""
    try:
        fields = list(_fields(data))
        step = next((value for number, value in fields if number == 2 and isinstance(value, int)), 0)
        step -= (step >> 63) << 64
        values = [value for summary in _messages(fields, 5) for value in _messages(_fields(summary), 1)]
        return [Scalar(*found) for value in values if (found := _tagged(value, max(step, 0))) is not None]
    except (IndexError, struct.error):
        return []


def _tagged(value: bytes, step: int) -> tuple[str, int, float] | None:
    fields = list(_fields(value))
    tag = next((found for number, found in fields if number == 1 and isinstance(found, bytes)), b"")
    for number, found in fields:
        if number == 2 and isinstance(found, float):
            return tag.decode("utf-8", "replace"), step, found
        if number == 8 and isinstance(found, bytes):
            held = _of_tensor(list(_fields(found)))
            return None if held is None else (tag.decode("utf-8", "replace"), step, held)
    return None


def _of_tensor(fields: Sequence[tuple[int, int | float | bytes]]) -> float | None:
    """Return the number in a tensor with one element; None for any other tensor."""
    form, size = _FORMATS.get(next((v for number, v in fields if number == 1 and isinstance(v, int)), 0), ("", 0))
    for number, found in fields:
        if number in (4, 5, 6) and isinstance(found, bytes) and size and len(found) == size:
            return float(struct.unpack(form, found)[0])
        if number in (5, 6) and isinstance(found, float):
            return found
    return None


def _messages(fields: Iterable[tuple[int, int | float | bytes]], wanted: int) -> Iterator[bytes]:
    for number, found in fields:
        if number == wanted and isinstance(found, bytes):
            yield found


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield the number and the value of each field of a message. Raises IndexError or struct.error if it is damaged."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == _VARINT:
            value, place = _varint(data, place)
            yield key >> 3, value
        elif kind == _BYTES:
            length, place = _varint(data, place)
            if place + length > len(data):
                raise IndexError
            yield key >> 3, data[place : place + length]
            place += length
        elif kind in (_FIXED32, _FIXED64):
            form, size = ("<f", 4) if kind == _FIXED32 else ("<d", 8)
            yield key >> 3, struct.unpack_from(form, data, place)[0]
            place += size
        else:
            raise IndexError


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise IndexError
