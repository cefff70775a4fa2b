"""Sums of powers of what lies in a file. The kernels read it themselves: nothing waits for Python in between."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from gradclip._src import native
from gradclip._src.backends.host.arrays import aligned_empty
from gradclip._src.core.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from gradclip._src.updates.files.source import PIECE, Source

Sums = list[tuple[int, float]]
"""Of each piece, its number of elements and the sum of their powers."""

READ_BY_KERNELS = frozenset(one.name for one in (FLOAT16, BFLOAT16, FLOAT32, FLOAT64))
_MOST_THREADS = 4  # more would take more memory, and wait for it
_FOR_A_THREAD = 5 << 20  # bytes: two pieces, and a chunk of their difference
_IN_ONE_CALL = 32  # pieces: then progress is shown
_FREE: list[np.ndarray] = []

Found = tuple[list[float], int, int, bool]
"""What the kernels return: sums, a checksum, an error of the system or 0, and whether the file ended before."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Which sums: the order, whether half types are added in float32, and by how many threads."""

    p: float
    halves: bool
    threads: int


@dataclass(slots=True)
class Stretch:
    """A stretch of a file. `checks`: its checksum is wanted too, which is then in `checksum`."""

    source: Source
    offset: int
    size: int
    checks: bool = False
    checksum: int = 0

    @property
    def readable(self) -> bool:
        """Whether the kernels can read it."""
        return native.checks_files() if self.checks else native.reads_files()

    def sums(self, dtype: str, asked: Asked) -> Sums:
        """Return the sums of numbers of a dtype, piece by piece."""
        item = np.dtype(np.uint16 if dtype == BFLOAT16.name else dtype).itemsize
        most = PIECE // item

        def call(start: int, count: int, memory: memoryview) -> Found:
            place = self.source.number(), start
            more = memory, self.checks, asked.threads
            return native.kernels.file_sums(place, count, dtype, asked.p, asked.halves, most, *more)

        return _with_sizes(self._found(item, call), self.size // item, most)

    def differences(self, other: "Stretch", dtype: str, asked: Asked) -> Sums:
        """Return the sums of the numbers minus others of the same dtype, in float64."""
        item = np.dtype(np.uint16 if dtype == BFLOAT16.name else dtype).itemsize
        most = PIECE // item

        def call(start: int, count: int, memory: memoryview) -> Found:
            places = (self.source.number(), start), (other.source.number(), start - self.offset + other.offset)
            return native.kernels.difference_sums(*places, count, dtype, asked.p, most, memory, asked.threads)

        found = _with_sizes(self._found(item, call), self.size // item, most)
        other.source.has_read(other.size)
        return found

    def counted(self, table: np.ndarray, asked: Asked) -> Sums:
        """Return the sum of numbers of one byte each, whose values a table has."""

        def call(start: int, count: int, memory: memoryview) -> Found:
            return native.kernels.byte_counts((self.source.number(), start), count, memory, self.checks)

        counts = np.zeros(table.size)
        for part in self._found(1, call):
            counts += part
        there = counts > 0
        powers = np.abs(table[there].astype(np.float64)) ** asked.p
        finite = bool(np.isfinite(powers).all())
        return [(self.size, math.fsum((counts[there] * powers).tolist()) if finite else math.nan)] * (self.size > 0)

    def _found(self, item: int, call: Callable[[int, int, memoryview], Found]) -> Iterator[list[float]]:
        """Yield the sums of parts of the stretch. `call` takes a place in the file, a number of items, and memory."""
        most = _IN_ONE_CALL * PIECE
        with _memory() as memory:
            for first in range(0, self.size, most):
                size = min(most, self.size - first)
                sums, checksum, error, ended = call(self.offset + first, size // item, memory.data)
                if error or ended:
                    self.source.refuse(f"it cannot be read: {os.strerror(error) if error else 'it is shorter now'}.")
                if self.checks:
                    self.checksum = native.kernels.crc32_joined(self.checksum, checksum, size)
                self.source.has_read(size)
                yield sums


def threads(most: int) -> int:
    """Return how many of so many threads are worth reading with."""
    return min(most, _MOST_THREADS)


def _with_sizes(found: Iterator[Sequence[float]], count: int, most: int) -> Sums:
    sums = [one for part in found for one in part]
    return [(min(most, count - place * most), one) for place, one in enumerate(sums)]


@contextmanager
def _memory() -> Iterator[np.ndarray]:
    """Give memory for all threads, which is kept: new memory takes longer than to read into it."""
    memory = _FREE.pop() if _FREE else aligned_empty((_MOST_THREADS * _FOR_A_THREAD,), np.uint8)
    try:
        yield memory
    finally:
        _FREE[:] = [memory]
