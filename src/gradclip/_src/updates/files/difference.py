"""The difference of two files, array by array and piece by piece: the update between two checkpoints."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from gradclip._src.backends.host.arrays import HostArray, as_float
from gradclip._src.core.formats import is_complex_name
from gradclip._src.native import describe_buffers
from gradclip._src.updates.files.arrays import FileArray
from gradclip._src.updates.files.stored import FileError, StoredFile, shown
from gradclip._src.words import listed


@dataclass(frozen=True, slots=True)
class Difference:
    """One array minus another, in float64 or complex128: exact but for one rounding, also of narrower numbers."""

    left: FileArray
    right: FileArray

    @property
    def name(self) -> str:
        """The name of both."""
        return self.left.name

    @property
    def dtype(self) -> str:
        """The dtype of the difference, or that of the left array if it does not count."""
        if not self.left.kind.counts:
            return self.left.dtype
        return "complex128" if is_complex_name(self.left.dtype) or is_complex_name(self.right.dtype) else "float64"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of both."""
        return self.left.shape

    def pieces(self) -> Iterator[HostArray]:
        """Yield 1-D pieces of the difference."""
        if self.left.layout == self.right.layout:
            both = self.left.pieces(), self.right.pieces()
        else:
            both = self.left.in_c_order(), self.right.in_c_order()
        memory, found = np.empty(0, self.dtype), HostArray(np.empty(0), self.dtype)
        for one, other in _in_step(*both):
            if one.size > memory.size:
                memory = np.empty(one.size, self.dtype)
            if one.size != found.size:  # otherwise the same object, so that a description of it stays valid
                found = HostArray(memory[: one.size], self.dtype)
            _subtract(one, other, found)
            yield found


def difference(left: StoredFile, right: StoredFile) -> StoredFile:
    """Return the arrays of one file minus those of another, which must have the same names and shapes."""
    others = {x.name: x for x in _of_files(right)}
    names = {x.name for x in left.arrays}
    for missing, file in ((names - others.keys(), right), (others.keys() - names, left)):
        if missing:
            _refuse(file, f"it lacks {listed([shown(x) for x in sorted(missing)])}, which the other file has.")
    found = [Difference(one, others[one.name]) for one in _of_files(left)]
    for one in found:
        if one.shape != one.right.shape:
            _refuse(right, f"'{shown(one.name)}' has shape {one.right.shape}, in the other file {one.shape}.")
        if one.left.kind.counts != one.right.kind.counts:
            _refuse(right, f"'{shown(one.name)}' is of {one.right.dtype}, in the other file of {one.left.dtype}.")
    return StoredFile(left.path, found, left.size + right.size)


def _in_step(left: Iterator[HostArray], right: Iterator[HostArray]) -> Iterator[tuple[HostArray, HostArray]]:
    """Yield pieces of equal lengths from two arrays whose own pieces differ in length."""
    one = other = empty = HostArray(np.empty(0), "float64")
    while True:
        one = one if one.size else next(left, empty)
        other = other if other.size else next(right, empty)
        common = min(one.size, other.size)
        if not common:
            return
        yield _part(one, 0, common), _part(other, 0, common)
        one, other = _part(one, common, one.size), _part(other, common, other.size)


def _part(piece: HostArray, first: int, end: int) -> HostArray:
    return HostArray(piece.data[first:end], piece.dtype)


def _subtract(one: HostArray, other: HostArray, to: HostArray) -> None:
    """Write the difference of two arrays, rounded once."""
    described = [describe_buffers([x.data]) for x in (one, other, to)]
    if one.dtype == other.dtype and all(x.kernels and not x.left_out for x in described):
        described[0].kernels.subtract(described[1].kernels, described[2].kernels)
        return
    left, right = (as_float(x.data, x.dtype) for x in (one, other))
    with np.errstate(all="ignore"):  # infinity minus infinity is NaN, which the norm reports
        np.subtract(left, right, out=to.data, dtype=to.dtype)


def _of_files(file: StoredFile) -> Sequence[FileArray]:
    return [x for x in file.arrays if isinstance(x, FileArray)]


def _refuse(file: StoredFile, why: str) -> NoReturn:
    raise FileError(f"{shown(file.path, None)}: {why}")
