"""Opening a file of arrays. What it is follows from its first bytes, never from its name."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath

from gradclip._src.updates.files import checkpoints, numpy_files, safetensors, zips
from gradclip._src.updates.files.arrays import FileArray
from gradclip._src.updates.files.source import Source
from gradclip._src.updates.files.stored import FileError, StoredFile, shown
from gradclip._src.words import listed

Progress = Callable[[int], object]

_START = 4096  # bytes
_NO_TEXT = b"\0\0\0\0"  # the end of a length below 2**32
_ZIPS = (b"PK\x03\x04", b"PK\x05\x06")
_KNOWN = "gradclip reads safetensors, PyTorch's .pt, the index.json of either, .npz and .npy."
_SAVE = "Save the arrays by numpy.savez or as safetensors."
_PICKLE = (
    "it is a pickle, which could run code. Load it where you trust it, and save it again by torch.save (since PyTorch "
    "1.6), numpy.savez or as safetensors."
)
_MESSAGE_PACK = f"it seems to be of MessagePack (.msgpack), as Flax writes it. {_SAVE}"
_OTHERS = {
    b"\x89HDF": f"it is an HDF5 file (.h5). {_SAVE}",
    b"GGUF": "it is a GGUF file. Save the arrays as safetensors.",
    b"\x1f\x8b": "it is compressed by gzip. Unpack it first.",
    b"\x28\xb5\x2f\xfd": "it is compressed by Zstandard (.zst). Unpack it first.",
    b"\xfd7zXZ": "it is compressed by xz. Unpack it first.",
    **{bytes([0x80, protocol]): _PICKLE for protocol in range(2, 6)},
    **{bytes([first]): _MESSAGE_PACK for first in (*range(0x81, 0x90), 0xDE, 0xDF)},  # a map
}
_FOLDERS = {
    ".metadata": "it is a checkpoint of torch.distributed.checkpoint (.distcp). Convert it: python -m "
    "torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt",
    "_CHECKPOINT_METADATA": f"it is a checkpoint of Orbax. Restore it by Orbax where you trust it. {_SAVE}",
    "_METADATA": f"it is a checkpoint of Orbax. Restore it by Orbax where you trust it. {_SAVE}",
    "saved_model.pb": f"it is a SavedModel of TensorFlow. {_SAVE}",
}


@contextmanager
def open_file(path: Path, progress: Progress = lambda _: None) -> Iterator[StoredFile]:
    """Open a file and read what its arrays are. `progress` is called with the number of bytes that each read took.

    Raises:
        FileError: If the file cannot be read as arrays. Also later, while pieces are read.
    """
    for name, why in _FOLDERS.items() if os.path.isdir(path) else ():
        if (path / name).exists():
            raise FileError(f"{shown(path, None)}: {why}")
    with ExitStack() as stack:
        source = stack.enter_context(Source(path, progress))
        try:
            arrays = _arrays(source, stack)
        except MemoryError:
            raise FileError(f"{source.shown}: reading what it holds takes more memory than there is.") from None
        yield StoredFile(path, arrays, sum(x.bytes_to_read for x in arrays))


def _arrays(source: Source, stack: ExitStack) -> Sequence[FileArray]:
    start = source.start(_START)
    if start.lstrip().startswith(b"{") and start[4:8] != _NO_TEXT:
        return _of_index(source, stack)
    return _of_one_file(source, start)


def _of_one_file(source: Source, start: bytes) -> list[FileArray]:
    header = int.from_bytes(start[:8], "little") + 8  # where that of safetensors would end
    if start[8:9] == b"{" and header <= source.size and start.startswith(_ZIPS):
        source.refuse("it can be read as safetensors and as a zip archive. Save it again in one format.")
    if start.startswith(numpy_files.MAGIC):
        return [numpy_files.array_of(source)]
    if start.startswith(_ZIPS):
        archive = zips.opened(source)
        if checkpoints.is_checkpoint(archive):
            return checkpoints.read(source, archive)
        return numpy_files.arrays_of(archive, source.refuse, source.progress)
    pickled = start[:1] == b"\x80" and start[8:9] != b"{"  # a short one may look like a length
    if (start[4:8] == _NO_TEXT and not pickled) or start[8:9] == b"{":
        return safetensors.read(source)
    why = next((why for magic, why in _OTHERS.items() if start.startswith(magic)), "its format is unknown.")
    source.refuse(f"{why if start else 'it is empty.'} {_KNOWN}")


def _of_index(source: Source, stack: ExitStack) -> Sequence[FileArray]:
    """Return the arrays of all files that an index of safetensors or of .pt names. They lie beside it."""
    places = _weight_map(source)
    found: dict[str, FileArray] = {}
    for shard in dict.fromkeys(places.values()):
        part = stack.enter_context(Source(source.path.with_name(shard), source.progress))
        arrays = {x.name: x for x in _of_one_file(part, part.start(_START))}
        expected = {name for name, place in places.items() if place == shard}
        for names, what in ((expected - arrays.keys(), "lacks"), (arrays.keys() - expected, "also has")):
            if names:
                part.refuse(f"it {what} {listed([shown(x) for x in sorted(names)])}, unlike what its index says.")
        found |= arrays
    return [found[name] for name in places]


def _weight_map(source: Source) -> dict[str, str]:
    if source.size > safetensors.MOST_BYTES:
        source.refuse(f"its JSON has {source.size} bytes. gradclip reads at most {safetensors.MOST_BYTES}.")
    try:
        index = json.loads(source.bytes_at(0, source.size), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        source.refuse(f"its JSON is damaged: {shown(error)}")
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        source.refuse("it is JSON without a weight_map of names to files, so no index of safetensors or .pt.")
    for name in set(places.values()):
        if name in ("", ".", "..") or "\0" in name or {PurePosixPath(name).name, PureWindowsPath(name).name} != {name}:
            source.refuse(f"its weight_map names '{shown(name)}'. Its files must lie beside the index, in its folder.")
    return places


def _without_repeats(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a name more than once")
    return found
