"""What a file of arrays is to those who measure it: names, dtypes, shapes, and pieces that are read one by one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gradclip._src.backends.host.arrays import HostArray
from gradclip._src.words import printable

_LONGEST = 80  # characters of a name in an error


class FileError(ValueError):
    """A file that cannot be read as arrays: one line with its name, what is wrong, and what to do."""


class Stored(Protocol):
    """One named array that is read piece by piece: an array in memory, or one in a file."""

    @property
    def name(self) -> str:
        """The name, such as "encoder.w". Names differ within a file."""

    @property
    def dtype(self) -> str:
        """The bare name of the dtype, such as "float32", "bfloat16", "int64", "bool" or "float8_e4m3fn"."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""

    def pieces(self) -> Iterator[HostArray]:
        """Yield 1-D pieces that cover the array, in the order of memory. Each call reads again from the start.

        The memory of a piece may be used again for the next one. float8 comes as float32, which holds the same
        numbers. All other pieces have the dtype of the array.
        """


@dataclass(frozen=True)
class StoredFile:
    """The arrays of an open file, in the order of the file. `size` is how many bytes of them `pieces` will read."""

    path: Path
    arrays: Sequence[Stored]
    size: int


def shown(text: object, longest: int | None = _LONGEST) -> str:
    """Return a name from a file as an error shows it: short, and with control characters escaped."""
    return printable(text, longest)
