"""Arrays in files: what each is called, how its bytes are numbers, where they lie, and its numbers piece by piece."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gradclip._src.backends.host.arrays import HostArray
from gradclip._src.updates.files.dtypes import Dtype
from gradclip._src.updates.files.layout import MemoryLayout
from gradclip._src.updates.files.source import PIECE, Source
from gradclip._src.updates.files.stored import FileError, shown
from gradclip._src.updates.files.sums import READ_BY_KERNELS, Asked, Stretch, Sums


class Bytes(Protocol):
    """The bytes of one array, wherever they are."""

    @property
    def to_read(self) -> int:
        """How many bytes of the file `ranges` reads."""

    def stretch(self) -> Stretch | None:
        """Return where they lie in the file as they are; None if they do not."""

    def check(self, checksum: int) -> None:
        """Raise FileError if this is not the checksum of the stretch, if that has one."""

    def ranges(self, most: int) -> Iterator[np.ndarray]:
        """Yield all bytes in order, `most` at a time and then the rest, in memory that is used again."""

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

    def stretch(self) -> Stretch:
        return Stretch(self.source, self.offset, self.size)

    def check(self, checksum: int) -> None:
        return

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

    def stretch(self) -> Stretch | None:
        """Return where the numbers lie, if the kernels can read them there."""
        found = self.stored.stretch() if self.kind.counts and self.layout.dense else None
        return found if found is not None and found.readable else None

    def sums(self, asked: Asked) -> Sums | None:
        """Return the sum of powers of each piece that `pieces` yields; None if the kernels cannot read the numbers."""
        table = self.kind.byte_table
        found = None if table is None and (self.kind.converts or self.dtype not in READ_BY_KERNELS) else self.stretch()
        if found is None:
            return None
        sums = found.sums(self.dtype, asked) if table is None else found.counted(table, asked)
        self.stored.check(found.checksum)
        return sums

    def pieces(self) -> Iterator[HostArray]:
        """Yield 1-D pieces that cover the array, in the order of memory."""
        return self._in_memory_order() if self.layout.dense else self._gathered(self.layout.in_memory_order)

    def in_c_order(self) -> Iterator[HostArray]:
        """Yield 1-D pieces that cover the array in C order. This is slow if it lies in another order."""
        if self.layout.in_c_order:
            yield from self._in_memory_order()
            return
        yield from self._gathered(self.layout)

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
