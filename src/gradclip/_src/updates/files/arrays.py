"""Arrays in files: what each is called, how its bytes are numbers, where they lie, and its numbers piece by piece."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gradclip._src.backends.host.arrays import HostArray
from gradclip._src.updates.files.dtypes import Dtype
from gradclip._src.updates.files.layout import MemoryLayout
from gradclip._src.updates.files.source import PIECE, Source
from gradclip._src.updates.files.stored import FileError, shown

_IN_EVERY = "Error while deserializing header: "  # error of safetensors


class Bytes(Protocol):
    """The bytes of one array, wherever they are."""

    @property
    def to_read(self) -> int:
        """How many bytes of the file `ranges` reads."""

    def ranges(self, most: int) -> Iterator[np.ndarray]:
        """Yield all bytes in order, `most` at a time and then the rest, in memory that may be used again."""

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill the memory with the bytes from a place on."""


@dataclass(frozen=True, slots=True)
class PlainBytes:
    """Bytes that lie in a file as they are."""

    source: Source
    offset: int
    size: int

    @property
    def to_read(self) -> int:
        return self.size

    def ranges(self, most: int) -> Iterator[np.ndarray]:
        return self.source.ranges(self.offset, self.size, most)

    def read(self, offset: int, memory: memoryview) -> None:
        self.source.read(self.offset + offset, memory)


@dataclass(frozen=True, slots=True)
class FileArray:
    """An array in a file."""

    name: str
    kind: Dtype
    layout: MemoryLayout
    stored: Bytes

    @property
    def dtype(self) -> str:
        """The bare name of the dtype."""
        return self.kind.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self.layout.shape

    @property
    def bytes_to_read(self) -> int:
        """How many bytes of the file `pieces` reads. Numbers that do not count are not read."""
        return self.stored.to_read if self.kind.counts else 0

    def pieces(self) -> Iterator[HostArray]:
        """Yield 1-D pieces that cover the array, in the order of memory."""
        return self._in_memory_order() if self.layout.dense else self._gathered(self.layout.in_memory_order)

    def in_c_order(self) -> Iterator[HostArray]:
        """Yield 1-D pieces that cover the array in C order. This is slow if it lies in another order."""
        return self._in_memory_order() if self.layout.in_c_order else self._gathered(self.layout)

    def _gathered(self, layout: MemoryLayout) -> Iterator[HostArray]:
        name, numbers = self._numbers()
        for block in layout.gathered(self.kind.raw, self.stored.read):
            yield HostArray(numbers(block), name)

    def _in_memory_order(self) -> Iterator[HostArray]:
        name, numbers = self._numbers()
        raw, converts = self.kind.raw, self.kind.converts
        widening = max(1, np.dtype(np.float32).itemsize // raw.itemsize if name != self.dtype else 1)
        last, found = None, HostArray(np.empty(0), name)
        for piece in self.stored.ranges(PIECE // widening // raw.itemsize * raw.itemsize):
            # Full pieces are one object in one memory, so that a description of it for the kernels stays valid.
            if piece is not last or converts:
                found = HostArray(numbers(piece.view(raw)), name)
            last = piece
            yield found

    def _numbers(self) -> tuple[str, Callable[[np.ndarray], np.ndarray]]:
        if not self.kind.counts:
            raise FileError(f"{shown(self.name)} holds {self.dtype}, which is not measured.")
        return self.kind.numbers()


@contextmanager
def read_by(package: str, source: Source) -> Iterator[str]:
    """Give the path to a package that reads the file itself, and refuse what it cannot read, or what changes meanwhile.

    If the package is missing, the error says how to install it.
    """
    try:
        source.check_path()
        yield str(source.path)
        source.check_path()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        source.refuse(f"to read it needs {package}. To install it: pip install {package}")
    except (FileError, MemoryError):
        raise
    except Exception as error:  # whatever the package raises for a damaged file
        source.refuse(f"{package} does not read it: {shown(str(error).removeprefix(_IN_EVERY), 300)}")
