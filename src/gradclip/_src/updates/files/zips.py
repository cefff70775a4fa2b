"""Zip archives: where each member lies, checked before anything is read, and its bytes, unpacked and checked."""

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from gradclip._src.native import checksum
from gradclip._src.updates.files.source import PIECE, Source
from gradclip._src.updates.files.stored import FileError, shown
from gradclip._src.updates.files.sums import Stretch

STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
_MOST_DIRECTORY = 1 << 22  # bytes, some 40,000 members; `zipfile` takes 15 times the memory
_MOST_IN_MEMORY = 1 << 25
_LOCAL = struct.Struct("<4s5H3L2H")
_LOCAL_MAGIC = b"PK\x03\x04"
_ENCRYPTED, _PATCHED, _STRONG = 0x1, 0x20, 0x40
_DAMAGED = "the zip archive is damaged"


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an archive: where its packed bytes lie, and what they unpack to."""

    name: str
    method: int
    offset: int
    packed: int
    size: int
    checksum: int


def members(source: Source) -> list[Member]:
    """Return the members in the order of the file. Raises FileError if they overlap, repeat, or leave the file."""
    try:
        with zipfile.ZipFile(_Limited(source)) as archive:
            found = [_member(source, info) for info in archive.infolist()]
            end = archive.start_dir
    except FileError:
        raise
    except (zipfile.BadZipFile, struct.error, ValueError, OSError, EOFError, NotImplementedError, OverflowError) as why:
        source.refuse(f"{_DAMAGED}, or cut off: {shown(why)}.")
    found.sort(key=lambda x: x.offset)
    names: set[str] = set()
    for one, after in zip(found, [*(x.offset for x in found[1:]), end], strict=False):
        if one.name in names:
            source.refuse(f"the zip archive has the member '{shown(one.name)}' more than once.")
        if one.offset + one.packed > after:
            source.refuse(f"{_DAMAGED}: '{shown(one.name)}' overlaps what lies behind it, or is cut off.")
        names.add(one.name)
    return found


def _member(source: Source, info: zipfile.ZipInfo) -> Member:
    """Return a member, after its own header has been compared with the archive's directory."""
    name = shown(info.filename)
    if info.flag_bits & (_ENCRYPTED | _PATCHED | _STRONG):
        source.refuse(f"the member '{name}' is encrypted. Save it without a password.")
    if info.compress_type not in (STORED, DEFLATED):
        source.refuse(f"the member '{name}' has compression {info.compress_type}. Save it by numpy.savez_compressed.")
    if info.compress_type == STORED and info.file_size != info.compress_size:
        source.refuse(f"{_DAMAGED}: '{name}' is not compressed, but its two sizes differ.")
    if not 0 <= info.header_offset <= source.size - _LOCAL.size:
        source.refuse(f"{_DAMAGED}: '{name}' lies outside of the file.")
    magic, _, flags, method, *_, length, extra = _LOCAL.unpack(source.bytes_at(info.header_offset, _LOCAL.size))
    start = info.header_offset + _LOCAL.size
    if magic != _LOCAL_MAGIC or method != info.compress_type or flags & _ENCRYPTED or start + length > source.size:
        source.refuse(f"{_DAMAGED}: '{name}' has a header that differs from the archive's directory.")
    if source.bytes_at(start, length) != info.orig_filename.encode("utf-8" if flags & 0x800 else "cp437"):
        source.refuse(f"{_DAMAGED}: '{name}' has another name in the archive's directory than in its own header.")
    return Member(info.filename, method, start + length + extra, info.compress_size, info.file_size, info.CRC)


class _Limited(io.RawIOBase):
    """A file for `zipfile` that refuses long reads before memory is allocated for them."""

    def __init__(self, source: Source) -> None:
        self._source, self._place = source, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._source.size)[whence]
        if self._place < 0:
            raise OSError("a place before its start")
        return self._place

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._source.size - self._place)
        size = rest if size < 0 else min(size, rest)
        if size > _MOST_DIRECTORY:
            self._source.refuse(f"the directory of the zip archive has {size} bytes, more than gradclip reads.")
        found = self._source.bytes_at(self._place, size)
        self._place += size
        return found


class _Inflating:
    """A deflated member. Never more is unpacked than is asked for."""

    def __init__(self, source: Source, member: Member) -> None:
        self._source, self._name = source, shown(member.name)
        self._packed = source.ranges(member.offset, member.packed, PIECE)
        self._inflate, self._rest = zlib.decompressobj(-zlib.MAX_WBITS), b""

    def fill(self, memory: np.ndarray) -> None:
        done = 0
        while done < memory.size:
            found = self._unpack(memory.size - done)
            if not found:
                self._source.refuse(f"{_DAMAGED}: '{self._name}' unpacks to fewer bytes than promised.")
            memory[done : done + len(found)] = np.frombuffer(found, np.uint8)
            done += len(found)

    def finish(self) -> bool:
        more = self._unpack(1)
        return not more and self._inflate.eof and not self._inflate.unused_data and next(self._packed, None) is None

    def _unpack(self, most: int) -> bytes:
        while not self._inflate.eof:
            source = self._rest or self._more()
            try:
                found = self._inflate.decompress(source, most)
            except zlib.error as error:
                self._source.refuse(f"{_DAMAGED}: '{self._name}' does not unpack: {error}.")
            self._rest = self._inflate.unconsumed_tail
            if found or not len(source):
                return found
        return b""

    def _more(self) -> memoryview | bytes:
        found = next(self._packed, None)
        return b"" if found is None else found.data


@dataclass(slots=True)
class MemberBytes:
    """What a member unpacks to, without its first bytes. A wrong checksum is an error once all has been read."""

    source: Source
    member: Member
    skip: int = 0
    _whole: np.ndarray | None = field(default=None, repr=False)
    _checked: bool = False

    @property
    def to_read(self) -> int:
        """How many bytes of the file `ranges` reads."""
        return self.member.packed

    def stretch(self) -> Stretch | None:
        """Return where the bytes lie if they are stored as they are."""
        if self.member.method != STORED:
            return None
        skip, size = self.skip, self.member.size - self.skip
        return Stretch(self.source, self.member.offset + skip, size, checks=True, checksum=checksum(self.start(skip)))

    def check(self, checksum: int) -> None:
        """Raise FileError if this is not the checksum of all bytes."""
        if checksum != self.member.checksum:
            self.source.refuse(f"'{shown(self.member.name)}' is damaged: its checksum (CRC-32) is wrong.")

    def start(self, size: int) -> bytes:
        """Return the first bytes, fewer if the member is shorter."""
        size = min(size, self.member.size)
        if self.member.method == STORED:
            return self.source.bytes_at(self.member.offset, size)
        memory = np.empty(size, np.uint8)
        _Inflating(self.source, self.member).fill(memory)
        return memory.tobytes()

    def ranges(self, most: int) -> Iterator[np.ndarray]:
        """Yield the bytes in order, `most` at a time."""
        found = 0
        for piece, size in (self._stored if self.member.method == STORED else self._unpacked)(most):
            found = checksum(piece.data, found)
            if size > 0:
                yield piece
        self.check(found)

    def _stored(self, most: int) -> Iterator[tuple[np.ndarray, int]]:
        """Yield pieces of a stored member, each with its size; the size of those to skip is negative."""
        offset, size = self.member.offset, self.member.size
        if self.skip:
            yield np.frombuffer(self.source.bytes_at(offset, self.skip), np.uint8), -self.skip
        for piece in self.source.ranges(offset + self.skip, size - self.skip, most):
            yield piece, piece.size

    def _unpacked(self, most: int) -> Iterator[tuple[np.ndarray, int]]:
        """Yield those of a deflated member."""
        memory, reading = self.source.memory(), _Inflating(self.source, self.member)
        full = memory[:most]
        try:
            for size in _sizes(self.skip, self.member.size, most):
                piece = full if size == most else memory[: abs(size)]
                reading.fill(piece)
                yield piece, size
        finally:
            self.source.give_back(memory)
        if not reading.finish():
            self.source.refuse(f"{_DAMAGED}: '{shown(self.member.name)}' unpacks to more bytes than promised.")

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill the memory from a place on, after the checksum has been checked."""
        if self.member.method == DEFLATED:
            memory[:] = self._in_memory()[offset : offset + len(memory)].data
            return
        if not self._checked:
            self.check_all()
            self._checked = True
        self.source.read(self.member.offset + self.skip + offset, memory)

    def check_all(self) -> None:
        """Read all bytes, only for the checksum."""
        for _ in self.ranges(PIECE):
            pass

    def _in_memory(self) -> np.ndarray:
        if self.member.size > _MOST_IN_MEMORY:
            self.source.refuse(
                f"'{shown(self.member.name)}' is compressed, in Fortran order, and of more than {_MOST_IN_MEMORY} "
                "bytes. To subtract it from an array in C order, save it by numpy.savez, uncompressed."
            )
        if self._whole is None:
            self._whole = np.concatenate([np.empty(0, np.uint8), *(piece.copy() for piece in self.ranges(PIECE))])
        return self._whole


def _sizes(skip: int, size: int, most: int) -> Iterator[int]:
    """Yield how many bytes to read each time. Negative: bytes to skip."""
    if skip:
        yield -skip
    for start in range(skip, size, most):
        yield min(most, size - start)
