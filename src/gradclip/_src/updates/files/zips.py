"""Zip archives that every reader understands alike: `zipfile` reads them here, PyTorch has a reader of its own.

Readers differ in where they look for the directory, and in which of two members of one name, or of two fields of one
member, they take. So the directory must lie where the end of the file says, and nothing may be there twice.
"""

import io
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from gradclip._src.updates.files.source import Source
from gradclip._src.updates.files.stored import FileError, shown

Refuse = Callable[[str], NoReturn]

_MOST_DIRECTORY = 1 << 22  # bytes, some 40,000 members; `zipfile` takes 15 times the memory
_END, _LOCATOR, _END_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sLQL"), struct.Struct("<4sQ2H2L4Q")
_ENCRYPTED, _UTF_8 = 0x1, 0x800  # flags
_FOLDER = 0x10  # an attribute
DAMAGED = "the zip archive is damaged, or cut off"


def opened(source: Source) -> zipfile.ZipFile:
    """Return the archive. Raises FileError if another reader could find other members in it."""
    with told(source.refuse):
        archive = zipfile.ZipFile(_Limited(source))
    _check_directory(source, archive)
    names: set[str] = set()
    for one in archive.infolist():
        name = shown(one.filename)
        if one.filename in names:
            source.refuse(f"the zip archive has the member '{name}' more than once.")
        old = not one.filename.isascii() and not one.flag_bits & _UTF_8
        if old or one.orig_filename != one.filename or one.is_dir() or one.external_attr & _FOLDER:
            source.refuse(f"the member '{name}' is a folder, or its name is in an old encoding. Save the file again.")
        if _repeats(one.extra):
            source.refuse(f"{DAMAGED}: '{name}' has one field twice.")
        if one.flag_bits & _ENCRYPTED:
            source.refuse(f"the member '{name}' is encrypted. Save it without a password.")
        if one.header_offset + one.compress_size > archive.start_dir:
            source.refuse(f"{DAMAGED}: '{name}' overlaps what lies behind it.")
        names.add(one.filename)
    return archive


def _repeats(extra: bytes) -> bool:
    """Say whether one of the fields that follow a member's name in the directory is there twice, or cut off."""
    seen: set[bytes] = set()
    while extra:
        kind, end = extra[:2], 4 + int.from_bytes(extra[2:4], "little")
        if kind in seen or end > len(extra):
            return True
        seen.add(kind)
        extra = extra[end:]
    return False


def _check_directory(source: Source, archive: zipfile.ZipFile) -> None:
    """Refuse an archive whose directory does not lie right before its end, from where the end says on."""
    end = source.size - _END.size
    magic, *_, size, start, comment = _END.unpack(source.bytes_at(end, _END.size))
    before = source.bytes_at(end - _LOCATOR.size, _LOCATOR.size) if end >= _LOCATOR.size + _END_64.size else b""
    if before.startswith(b"PK\x06\x07"):
        end -= _LOCATOR.size + _END_64.size
        _, _, place, _ = _LOCATOR.unpack(before)
        magic_64, length, *_, size, start = _END_64.unpack(source.bytes_at(end, _END_64.size))
        if (magic_64, length, place) != (b"PK\x06\x06", _END_64.size - 12, end):
            source.refuse(f"{DAMAGED}: it has two directories, or bytes between them and its end.")
    if magic != b"PK\x05\x06" or comment or start + size != end or start != archive.start_dir:
        source.refuse(
            f"{DAMAGED}: it has a comment, or something before or behind its members and its directory. Is it one of "
            "several files (.distcp) of torch.distributed.checkpoint? Then convert their folder: python -m "
            "torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt"
        )


@contextmanager
def told(refuse: Refuse) -> Iterator[None]:
    """Refuse what `zipfile` cannot read, with its reason."""
    try:
        yield
    except (FileError, MemoryError):
        raise
    except Exception as why:  # whatever damaged bytes lead to
        refuse(f"{DAMAGED}: {shown(why)}.")


class _Limited(io.RawIOBase):
    """A file for `zipfile` that refuses long reads before memory is allocated for them."""

    def __init__(self, source: Source) -> None:
        self._source, self._place = source, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
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
            self._source.refuse(
                f"the directory of the zip archive has {size} bytes. gradclip reads at most {_MOST_DIRECTORY}. Save "
                "fewer arrays, or as safetensors."
            )
        found = self._source.bytes_at(self._place, size)
        self._place += size
        return found
