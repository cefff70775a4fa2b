"""Opening a file of arrays. What it is follows from its first bytes, never from its name."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gradclip._src.updates.files import checkpoints, npy, npz, safetensors
from gradclip._src.updates.files.arrays import FileArray, PlainBytes
from gradclip._src.updates.files.source import Source
from gradclip._src.updates.files.stored import FileError, StoredFile
from gradclip._src.updates.files.zips import members

Progress = Callable[[int], object] | None

THE_ARRAY = "array"  # the name of an array that is alone in its file
_START = 4096  # bytes
_ZIPS = (b"PK\x03\x04", b"PK\x05\x06")
_KNOWN = "gradclip reads safetensors and its index.json, .npz, .npy, and PyTorch's .pt."
_OTHERS = {
    b"\x89HDF": "it is an HDF5 file. Save the arrays by numpy.savez or as safetensors.",
    b"GGUF": "it is a GGUF file. Save the arrays as safetensors.",
    b"\x80": "it is a pickle, which could run code. Load it where you trust it, and save it again by torch.save (since "
    "PyTorch 1.6), numpy.savez or as safetensors.",
    b"\x1f\x8b": "it is compressed by gzip. Unpack it first.",
}


@contextmanager
def open_file(path: Path, progress: Progress = None) -> Iterator[StoredFile]:
    """Open a file and read what its arrays are. `progress` is called with the number of bytes that each read took.

    Raises:
        FileError: If the file cannot be read as arrays. Also later, while pieces are read.
    """
    opened = False

    def report(count: int) -> None:
        if opened and progress is not None:  # what is read to open a file is not part of `size`
            progress(count)

    with ExitStack() as stack:
        source = stack.enter_context(Source(path, report))
        try:
            arrays = _arrays(source, stack, report)
        except MemoryError:
            raise FileError(f"{source.shown}: reading what it holds takes more memory than there is.") from None
        opened = True
        yield StoredFile(path, arrays, sum(x.bytes_to_read for x in arrays))


def _arrays(source: Source, stack: ExitStack, progress: Progress) -> Sequence[FileArray]:
    start = source.start(_START)
    if start.startswith(npy.MAGIC):
        return [_single(source)]
    if start.startswith(_ZIPS):
        found = members(source)
        return checkpoints.read(source, found) if checkpoints.is_checkpoint(found) else npz.read(source, found)
    # A length below 2**32 has four zero bytes, which no text has.
    if len(start) >= 8 and start[4:8] == b"\0\0\0\0":
        return safetensors.read(source)
    if start.lstrip().startswith(b"{"):
        return safetensors.read_index(source, stack, progress)
    if start[8:9] == b"{":
        return safetensors.read(source)
    why = next((why for magic, why in _OTHERS.items() if start.startswith(magic)), "its format is unknown.")
    source.refuse(f"{why if start else 'it is empty.'} {_KNOWN}")


def _single(source: Source) -> FileArray:
    try:
        header = npy.header_of(source.start(npy.LONGEST))
    except ValueError as error:
        source.refuse(str(error))
    if header.start + header.size > source.size:
        source.refuse(
            f"its header promises {header.size} bytes, but the file holds {source.size - header.start}. It is cut off."
        )
    return FileArray(THE_ARRAY, header.kind, header.layout, PlainBytes(source, header.start, header.size))
