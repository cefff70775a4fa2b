"""NumPy's files: `.npy`, whose header NumPy itself reads, and `.npz`, a zip archive of such files."""

import io
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import IO, NamedTuple

import numpy as np
from numpy.lib import format as npy

from gradclip._src.updates.files.arrays import FileArray, PlainBytes
from gradclip._src.updates.files.dtypes import Dtype
from gradclip._src.updates.files.layout import MemoryLayout
from gradclip._src.updates.files.source import Source
from gradclip._src.updates.files.stored import shown
from gradclip._src.updates.files.zips import Refuse, told

MAGIC = b"\x93NUMPY"
THE_ARRAY = "array"  # the name of an array that is alone in its file
LONGEST = 12 + 10_000  # bytes of the start and the header, as NumPy's own limit
_SUFFIX = ".npy"
_MOST_AXES = 64
_MOST_IN_MEMORY = 1 << 26  # bytes
_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class Header(NamedTuple):
    """What a header says: dtype, layout, and at which byte the array starts."""

    kind: Dtype
    layout: MemoryLayout
    start: int

    @property
    def size(self) -> int:
        """The number of bytes of the array."""
        return self.layout.size * self.kind.raw.itemsize


def header_of(start: bytes) -> Header:
    """Read the header of an array from its first bytes, as `numpy.load` does. Raises ValueError, which says why not."""
    try:
        return _header_in(io.BytesIO(start))
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # NumPy raises whatever a damaged header leads to
        raise ValueError(str(error)) from None


def _header_in(file: IO[bytes]) -> Header:
    version = npy.read_magic(file)
    if version not in _READERS:  # the third is for names of fields
        raise ValueError(f"its .npy version {version} is for arrays with named fields, which are not measured.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of integers as Python 2 wrote them
        shape, fortran, dtype = _READERS[version](file)
    if dtype.hasobject:
        raise ValueError(
            "it holds Python objects, which are pickled. gradclip reads no pickles: they could run code. "
            "Save an array of numbers."
        )
    if dtype.subdtype or len(shape) > _MOST_AXES or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"its .npy header has the shape {shown(shape)} and the dtype {shown(dtype)}.")
    order = MemoryLayout.fortran_order if fortran else MemoryLayout.c_order
    return Header(Dtype.of(dtype), order(shape), file.tell())


def array_of(source: Source) -> FileArray:
    """Return the array of an `.npy` file."""
    try:
        header = header_of(source.start(LONGEST))
    except ValueError as error:
        source.refuse(shown(error, 300))
    if header.start + header.size > source.size:
        source.refuse(
            f"its header promises {header.size} bytes, but the file holds {source.size - header.start}. It is cut off."
        )
    return FileArray(THE_ARRAY, header.kind, header.layout, PlainBytes(source, header.start, header.size))


@dataclass(slots=True)
class MemberBytes:
    """The bytes of an array in a zip archive. `zipfile` raises an error for a wrong checksum once all were read."""

    archive: zipfile.ZipFile
    member: zipfile.ZipInfo
    start: int
    size: int
    refuse: Refuse
    progress: Callable[[int], object]
    owner: object = None  # what closes the archive when nobody holds it any more
    _whole: bytes | None = field(default=None, repr=False)

    @property
    def to_read(self) -> int:
        """How many bytes of the file `ranges` reads."""
        return self.member.compress_size

    def ranges(self, most: int) -> Iterator[np.ndarray]:
        """Yield the bytes in order, `most` at a time."""
        with told(self.refuse), self.archive.open(self.member) as file:
            file.read(self.start)
            read = 0
            for first in range(0, self.size, most):
                piece = np.frombuffer(file.read(min(most, self.size - first)), np.uint8)
                if piece.size < min(most, self.size - first):
                    raise ValueError(f"'{shown(self.member.filename)}' unpacks to fewer bytes than promised")
                before, read = read, self.to_read * (first + piece.size) // self.size
                self.progress(read - before)
                yield piece
            if file.read(1):
                raise ValueError(f"'{shown(self.member.filename)}' unpacks to more bytes than promised")

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill the memory from a place on, after the checksum has been checked."""
        if self.size > _MOST_IN_MEMORY:
            self.refuse(
                f"'{shown(self.member.filename)}' has another order of axes than the array it is subtracted from, and "
                f"more than {_MOST_IN_MEMORY} bytes. Save it in C order, by numpy.ascontiguousarray."
            )
        if self._whole is None:
            self._whole = b"".join(piece.tobytes() for piece in self.ranges(_MOST_IN_MEMORY))
        memory[:] = self._whole[offset : offset + len(memory)]


def arrays_of(archive: zipfile.ZipFile, refuse: Refuse, progress: Callable[[int], object]) -> list[FileArray]:
    """Return the arrays of an archive. Those that are not measured are read here, for their checksums."""
    names = set(archive.namelist())
    for name in names:
        if f"{name}{_SUFFIX}" in names:
            refuse(f"it has two arrays named '{shown(name)}'.")
    return [member_of(archive, member, refuse, progress) for member in archive.infolist()]


def member_of(
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    refuse: Refuse,
    progress: Callable[[int], object] = lambda _: None,
    owner: object = None,
) -> FileArray:
    """Return one array of an archive."""
    name = shown(member.filename)
    with told(refuse), archive.open(member) as file:
        start = file.read(LONGEST)
    if not start.startswith(MAGIC):
        keras = " To measure a model of Keras, save its arrays: numpy.savez(path, *model.get_weights())."
        refuse(f"the member '{name}' is no array, so it is no .npz file.{keras * name.endswith('.json')}")
    try:
        header = header_of(start)
    except ValueError as error:
        refuse(f"'{name}': {shown(error, 300)}")
    if header.start + header.size != member.file_size:
        refuse(
            f"'{name}': its header promises {header.size} bytes, but the archive holds "
            f"{member.file_size - header.start}. It is damaged."
        )
    stored = MemberBytes(archive, member, header.start, header.size, refuse, progress, owner)
    if not header.kind.counts:
        for _ in replace(stored, progress=lambda _: None).ranges(_MOST_IN_MEMORY):
            pass
    return FileArray(member.filename.removesuffix(_SUFFIX), header.kind, header.layout, stored)
