"""An open file that is read at given places, into memory that is used again and again. Never a whole file."""

import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, Self

import numpy as np

from gradclip._src.backends.host.arrays import aligned_empty
from gradclip._src.updates.files.stored import FileError, shown

MOST_OPEN = 64  # files at a time
_MOST_FREE = 8  # pieces of memory that are kept
PIECE = 1 << 21  # bytes: what is read is still in the processor's cache when it is measured


class Source:
    """An open file: its path, its size, and how to read from it."""

    def __init__(self, path: Path, progress: Callable[[int], object] = lambda _: None) -> None:
        self.path = path
        self.progress = progress
        self._file = _opened(path)
        found = os.fstat(self._file.fileno())
        self._identity, self.size = _identity(found), found.st_size
        _keep_open(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()

    def rest(self) -> None:
        """Close the file. It is opened again if it is read."""
        self._file.close()
        _OPEN.pop(id(self), None)

    def _in_use(self) -> io.FileIO:
        """Return the open file. Raises FileError if it was closed meanwhile, and is another one now or has changed."""
        if self._file.closed:
            self._file = _opened(self.path)
            self._check(os.fstat(self._file.fileno()))
        _keep_open(self)
        return self._file

    def check_path(self) -> None:
        """Raise FileError if the path leads to another file now, or to one that has changed."""
        try:
            self._check(os.stat(self.path))
        except OSError as error:
            self.refuse(f"it cannot be read: {error.strerror}.")

    def _check(self, found: os.stat_result) -> None:
        if _identity(found) != self._identity:
            self.refuse("it has changed while it was read. Read it again.")

    @property
    def shown(self) -> str:
        """The path as errors show it: whole, but with control characters escaped."""
        return shown(self.path, None)

    def refuse(self, why: str) -> NoReturn:
        """Raise a FileError with the file's name."""
        raise FileError(f"{self.shown}: {' '.join(why.split())}")

    def start(self, size: int) -> bytes:
        """Return the first bytes, fewer if the file is shorter."""
        return self.bytes_at(0, min(size, self.size))

    def bytes_at(self, offset: int, size: int) -> bytes:
        """Return a few bytes. The caller has checked that the file holds them."""
        memory = bytearray(size)
        self._fill(offset, memoryview(memory))
        return bytes(memory)

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill the memory with numbers from a place of the file. Raises FileError if the file ends before."""
        self._fill(offset, memory)
        self._check(os.fstat(self._in_use().fileno()))
        self.progress(len(memory))

    def _fill(self, offset: int, memory: memoryview) -> None:
        done = 0
        try:
            file = self._in_use()
            file.seek(offset)
            while done < len(memory):
                count = file.readinto(memory[done:])
                if not count:
                    self.refuse(f"it ends after {offset + done} bytes, but held {self.size} when it was opened.")
                done += count
        except OSError as error:
            self.refuse(f"it cannot be read: {error.strerror}.")

    def memory(self) -> np.ndarray:
        """Return a piece of memory. Give it back with `give_back`."""
        return _FREE.pop() if _FREE else aligned_empty((PIECE,), np.uint8)

    def give_back(self, memory: np.ndarray) -> None:
        """Let a piece of memory be used again, for this file or another."""
        if len(_FREE) < _MOST_FREE:
            _FREE.append(memory)

    def ranges(self, offset: int, size: int, most: int) -> Iterator[np.ndarray]:
        """Yield a range of the file in pieces of `most` bytes, all in the same memory."""
        memory = self.memory()
        full = memory[: min(most, size)]
        try:
            for start in range(0, size, most):
                piece = full if start + most <= size else memory[: size - start]
                self.read(offset + start, piece.data)
                yield piece
        finally:
            self.give_back(memory)


_OPEN: dict[int, Source] = {}  # the one that was read last is the last
_FREE: list[np.ndarray] = []


def _keep_open(source: Source) -> None:
    """Close the files that were not read for longest if too many are open: systems allow few to a process."""
    _OPEN.pop(id(source), None)
    while len(_OPEN) >= MOST_OPEN:
        next(iter(_OPEN.values())).rest()
    _OPEN[id(source)] = source


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _opened(path: Path) -> io.FileIO:
    """Open a regular file. Raises FileError for anything else, before it is opened: to open a pipe could block."""
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
        file = io.FileIO(path, opener=_without_waiting) if regular else None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileError(f"{shown(path, None)} cannot be opened: {reason}.") from error
    if file is None or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise FileError(f"{shown(path, None)} is no regular file. Pass the path of a file of arrays.")
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
