"""Where the elements of an array lie in memory or in a file, and how to gather them in C order."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

GATHERED = 1 << 24  # bytes at a time: the longer, the fewer reads of single columns
_IN_ONE_READ = 1 << 18  # bytes that are read to get elements that lie apart
_APART = 1 << 14  # bytes that take about as long as one more read


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """A shape, and how many elements apart neighbors along each axis lie. Distances may be 0, but not negative."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def c_order(cls, shape: tuple[int, ...]) -> "MemoryLayout":
        """Return the layout in which the last axis changes first."""
        return cls(shape, tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))

    @classmethod
    def fortran_order(cls, shape: tuple[int, ...]) -> "MemoryLayout":
        """Return the layout in which the first axis changes first."""
        return cls(shape, tuple(math.prod(shape[:axis]) for axis in range(len(shape))))

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """The number of elements from the first to the last, with those between that are not its own."""
        return 1 + sum((n - 1) * d for n, d in zip(self.shape, self.strides, strict=True)) if self.size else 0

    @property
    def dense(self) -> bool:
        """Whether the elements lie side by side, each once, in the order of some axes."""
        return self._without_ones() == () or self._fills()

    @property
    def in_c_order(self) -> bool:
        """Whether the elements lie side by side in C order."""
        lengths = [n for n in self.shape if n != 1]
        own = [d for n, d in zip(self.shape, self.strides, strict=True) if n != 1]
        return not self.size or own == [math.prod(lengths[axis + 1 :]) for axis in range(len(lengths))]

    @property
    def in_memory_order(self) -> "MemoryLayout":
        """The same elements, with the axes ordered so that C order is the order of memory."""
        axes = sorted(zip(self.strides, self.shape, strict=True), reverse=True)
        return MemoryLayout(tuple(n for _, n in axes), tuple(d for d, _ in axes))

    def bytes_read(self, item: int) -> int:
        """Return about how many bytes it takes to read all elements of `item` bytes, with what separate reads take."""
        if self.dense:
            return self.size * item
        axes = [(d, n) for d, n in self._without_ones() if d]
        near = 1 + sum((n - 1) * d for d, n in axes if d * item <= _APART)
        far = math.prod(n for d, n in axes if d * item > _APART)
        return max(self.size * item, far * (near * item + _APART)) if self.size else 0

    def gathered(self, dtype: np.dtype, read: Callable[[int, memoryview], None]) -> Iterator[np.ndarray]:
        """Yield the elements in C order, as 1-D blocks in new memory. `read` fills memory from a byte on."""
        for start, block in self._blocks(max(1, GATHERED // dtype.itemsize)):
            result = np.empty(block.shape, dtype)
            _fill(result, block.strides, start, read)
            yield result.reshape(-1)

    def _without_ones(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted((d, n) for n, d in zip(self.shape, self.strides, strict=True) if n != 1))

    def _fills(self) -> bool:
        distance = 1
        for stride, length in self._without_ones():
            if stride != distance:
                return not self.size
            distance *= length
        return True

    def _blocks(self, most: int) -> "Iterator[tuple[int, MemoryLayout]]":
        """Yield parts of the array in C order with at most so many elements, and where each starts."""
        if self.size <= most:
            if self.size:
                yield 0, self
            return
        axis = next(i for i in range(len(self.shape)) if math.prod(self.shape[i + 1 :]) <= most)
        rows = most // math.prod(self.shape[axis + 1 :])
        for index in np.ndindex(self.shape[:axis]):
            before = sum(i * d for i, d in zip(index, self.strides, strict=False))
            for first in range(0, self.shape[axis], rows):
                shape = (min(rows, self.shape[axis] - first), *self.shape[axis + 1 :])
                yield before + first * self.strides[axis], MemoryLayout(shape, self.strides[axis:])


def _fill(result: np.ndarray, strides: tuple[int, ...], start: int, read: Callable[[int, memoryview], None]) -> None:
    """Fill an array with elements that lie `strides` apart, from `start` on."""
    layout, item = MemoryLayout(result.shape, strides), result.itemsize
    if layout.span * item <= _IN_ONE_READ:
        memory = np.empty(layout.span, result.dtype)
        read(start * item, memory.view(np.uint8).data)
        result[...] = np.lib.stride_tricks.as_strided(memory, result.shape, [d * item for d in strides])
        return
    axis = max(range(result.ndim), key=lambda i: strides[i] * (result.shape[i] > 1))
    step, length = strides[axis], result.shape[axis]
    room = _IN_ONE_READ // item - layout.span + (length - 1) * step  # beside what the other axes span
    rows = max(1, 1 + room // step) if step * item <= _APART else 1
    for first in range(0, length, rows):
        part = result[(slice(None),) * axis + (slice(first, first + rows),)]
        _fill(part, strides, start + first * step, read)
