"""Files as bytes and lines, with limits, so that no file can fill the memory."""

import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gradclip._src.logs.rows import LogError

LONGEST_LINE = 2**20
LARGEST_DOCUMENT = 2**28  # bytes of one JSON value
MOST_VALUES = 4_000_000  # of one JSON value; in memory each takes up to a hundred times the bytes that it has there
MOST = 2**31  # bytes of lines
START = 2**16
_GZIP, _OF_GZIP = b"\x1f\x8b", 31
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_CONTROLS = [bytes([byte]) for byte in range(32) if byte not in b"\t\n\r\b\f\x1b"]
_MOST_CONTROLS = 0.1  # of the bytes


def opened(path: Path) -> IO[bytes]:
    """Open a file, also one that gzip has compressed. Raises LogError if it cannot be opened."""
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == _GZIP
        file = path.open("rb")
        return io.BufferedReader(_Unzipped(file)) if compressed else file
    except OSError as error:
        raise _unreadable(path, error) from error


def start_of(path: Path) -> bytes:
    """Return the first bytes. Raises LogError if there are none, or if they are no text and no TensorBoard file."""
    with opened(path) as file:
        start = portion(file, START, path)
    if not start:
        raise LogError(f"{path} is empty.")
    return start


def is_text(start: bytes) -> bool:
    """Say whether bytes look like text in an encoding that can be read, but for some zeros, as a crash leaves them."""
    return start.startswith(_UTF16) or sum(map(start.count, _CONTROLS)) <= _MOST_CONTROLS * len(start)


def lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, without those that are too long to be of a log."""
    with opened(path) as file:
        done, whole = 0, True
        while done < MOST:
            part = _line(file, path)
            if not done and part.startswith(_UTF16):
                yield from document(path).splitlines()
                return
            if not part:
                return
            done += len(part)
            ends = part.endswith(b"\n")
            if whole and (ends or len(part) < LONGEST_LINE):
                yield (
                    part.decode("utf-8-sig" if done == len(part) else "utf-8", "replace")
                    .replace("\0", "")
                    .rstrip("\r\n")
                )
            whole = ends
    raise LogError(f"{path} has more than {MOST >> 30} GB. Pass a part of it.")


def document(path: Path) -> str:
    """Return the text of a file. Raises LogError if it is too large to be parsed as one."""
    with opened(path) as file:
        held = portion(file, LARGEST_DOCUMENT + 1, path)
    if len(held) > LARGEST_DOCUMENT:
        raise LogError(f"{path} is one value of more than {LARGEST_DOCUMENT >> 20} MB, too large for a log.")
    if sum(map(held.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise LogError(f"{path} is one value of more than {MOST_VALUES:,} values, too large for a log.")
    return held.decode("utf-16" if held.startswith(_UTF16) else "utf-8-sig", "replace")


def portion(file: IO[bytes], count: int, path: Path) -> bytes:
    """Read at most so many bytes."""
    parts, left = [], count
    try:
        while left and (part := file.read(min(left, START))):
            parts.append(part)
            left -= len(part)
    except OSError as error:
        raise _unreadable(path, error) from error
    return b"".join(parts)


def _line(file: IO[bytes], path: Path) -> bytes:
    try:
        return file.readline(LONGEST_LINE)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> LogError:
    return LogError(f"{path} could not be read: {error.strerror or error}.")


class _Unzipped(io.RawIOBase):
    """What a compressed file holds, as far as it is whole."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._engine, self._left = file, zlib.decompressobj(_OF_GZIP), b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        try:
            while True:
                if self._engine.eof:  # another compressed file may follow
                    self._left, self._engine = self._engine.unused_data, zlib.decompressobj(_OF_GZIP)
                fed = self._left or self._file.read(START)
                found = self._engine.decompress(fed, len(buffer))
                self._left = self._engine.unconsumed_tail
                if found or not fed:
                    break
        except zlib.error:
            return 0
        buffer[: len(found)] = found
        return len(found)
