"""PyTorch's checkpoints: `torch.load(weights_only=True)` loads them, so that whoever loads them later gets the same.

It maps the file, and only the places of the tensors are taken from what it returns. Their numbers are read from the
open file: a mapped file that is cut short meanwhile would end the process. `survey` looks at the pickle before.
"""

import re
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gradclip._src.core.formats import bare_name
from gradclip._src.updates.files.arrays import FileArray, PlainBytes, read_by
from gradclip._src.updates.files.dtypes import Dtype
from gradclip._src.updates.files.layout import MemoryLayout
from gradclip._src.updates.files.numpy_files import MAGIC
from gradclip._src.updates.files.source import Source
from gradclip._src.updates.files.stored import shown
from gradclip._src.updates.files.survey import MOST_BYTES, Stored, Survey

if TYPE_CHECKING:
    import torch

Keys = tuple[object, ...]

THE_TENSOR = "array"  # the name of a tensor that is alone in its file
_PICKLE = "/data.pkl"
_DESCRIPTOR, _LONG = 16, (1 << 32) - 1  # bytes behind a member, and from where on there are 8 more
_MOST_TIMES = 16  # as long as the file, for tensors that share storages
_ALWAYS = 1 << 26  # bytes
_DEEPEST, _MOST_VISITED, _MOST_ITEMS, _MOST_CHARACTERS = 100, 300_000, 3_000_000, 1 << 24
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None))
_KEYS = (str, int, float, bytes, bool, type(None))


def is_checkpoint(archive: zipfile.ZipFile) -> bool:
    """Say whether the members of an archive are those of a checkpoint."""
    return any(name.lower().endswith(_PICKLE) for name in archive.namelist())


def read(source: Source, archive: zipfile.ZipFile) -> list[FileArray]:
    """Return the tensors of a checkpoint, named by the keys that lead to them."""
    try:
        folder, members = _members(archive)
        reader = _reader(source)
        stored = _places(source, reader, members)
        order = stored.get(f"{folder}/byteorder")
        if order is not None and source.bytes_at(*order) != b"little":
            raise ValueError("its numbers are big-endian. Load it by PyTorch, and save it again on this machine.")
        survey = Survey(source.bytes_at(*stored[f"{folder}{_PICKLE}"]), folder, stored)
        survey.check()
        if f"{folder}/.format_version" in stored:
            alignment = stored.get(f"{folder}/.storage_alignment")
            _check_computed(reader, survey.in_order, 64 if alignment is None else int(source.bytes_at(*alignment)))
        loaded, places = _loaded(source, list(survey.in_order.values()))
        found = list(_Tensors().below(loaded))
        names = _names([keys for keys, _ in found])
        arrays = [_array(source, name, x, places) for name, (_, x) in zip(names, found, strict=True)]
        _check_sum(arrays, source.size)
    except (ValueError, RuntimeError) as error:  # the latter from PyTorch's reader
        source.refuse(str(error).removeprefix(f"{source.shown}: "))
    return arrays


def _members(archive: zipfile.ZipFile) -> tuple[str, dict[str, zipfile.ZipInfo]]:
    """Return the folder in the archive, and its members, named in small letters as PyTorch knows them."""
    folder = archive.namelist()[0].partition("/")[0].lower()
    members = {one.filename.lower(): one for one in archive.infolist()}
    if f"{folder}/constants.pkl" in members or not all(name.startswith(f"{folder}/") for name in members):
        raise ValueError("it is a TorchScript archive, or no checkpoint of torch.save. Save model.state_dict().")
    if f"{folder}{_PICKLE}" not in members:
        raise ValueError(f"it lacks '{shown(folder)}{_PICKLE}', so it is no checkpoint of torch.save.")
    if len(members) < len(archive.infolist()):
        raise ValueError("it has a member twice, in capitals and small letters. It is damaged.")
    for name, one in members.items():
        if one.compress_type != zipfile.ZIP_STORED or one.file_size != one.compress_size:
            raise ValueError(f"'{shown(one.filename)}' is compressed. Save the checkpoint by torch.save.")
        if not name.startswith(f"{folder}/data/") and one.file_size > MOST_BYTES:
            raise ValueError(f"'{shown(name)}' has {one.file_size} bytes. gradclip reads at most {MOST_BYTES}.")
    return folder, members


def _reader(source: Source) -> Any:
    """Return PyTorch's own reader of archives. It reads small members at once, so they are looked at before."""
    with read_by("torch", source) as path:
        import torch

        return torch._C.PyTorchFileReader(path)


def _places(source: Source, reader: Any, members: dict[str, zipfile.ZipInfo]) -> dict[str, Stored]:
    """Return where PyTorch finds each member."""
    found = {
        name: Stored(reader.get_record_offset(one.filename.partition("/")[2]), one.file_size)
        for name, one in members.items()
    }
    if any(source.bytes_at(start, min(len(MAGIC), size)) == MAGIC for start, size in found.values()):
        raise ValueError("it can be read as a checkpoint and as .npz. Save it again in one format.")
    return found


def _check_computed(reader: Any, storages: dict[str, Stored], alignment: int) -> None:
    """Refuse a file where PyTorch's `load.calculate_storage_offsets` would find other bytes than the archive has."""
    if next(iter(storages), "0") != "0" or not hasattr(reader, "get_record_offset_no_read"):
        return  # PyTorch would not compute them
    end = 0
    for key, place in storages.items():
        name = f"data/{key}"
        start = reader.get_record_offset_no_read(end, name, place.size, alignment) if end else place.offset
        if start != place.offset:
            raise ValueError(f"the storage '{shown(key)}' does not lie where PyTorch would compute it. Save it again.")
        long = max(end, place.size) >= _LONG
        end = start + place.size + (_DESCRIPTOR + 8 * long if place.size else 0)


def _loaded(source: Source, expected: list[Stored]) -> tuple[object, dict[int, Stored]]:
    """Return what `torch.load` gives, and where the storage at each address lies in the file."""
    mapped: list[tuple[int, int]] = []

    def noted(storage: Any, _location: str) -> Any:
        if storage.nbytes():
            mapped.append((storage.data_ptr(), storage.nbytes()))
        return storage

    with read_by("torch", source) as path, warnings.catch_warnings():
        import torch

        warnings.simplefilter("ignore")
        try:
            loaded = torch.load(path, map_location=noted, mmap=True, weights_only=True)
        except Exception as error:
            refused = re.search(r"GLOBAL (\S+) was not an allowed", str(error))
            source.refuse(
                f"its pickle has {shown(refused[1])}, which torch.load(weights_only=True) does not allow."
                if refused
                else f"torch.load does not read it: {shown(error, 300)}"
            )
    places = [one for one in expected if one.size]
    if [size for _, size in mapped] != [one.size for one in places]:
        raise ValueError("its pickle names other storages than torch.load reads. It is damaged.")
    return loaded, {address: one for (address, _), one in zip(mapped, places, strict=True)}


class _Tensors:
    """All tensors that hang on a value, wherever they do: values, keys, members, attributes, gradients."""

    def __init__(self) -> None:
        import torch

        self._tensor, self._kinds = torch.Tensor, (torch.Tensor, torch.nn.Parameter)
        self._others = (torch.dtype, torch.device, torch.layout, torch.qscheme, torch.Size)
        self._seen = self._characters = self._visited = 0

    def below(self, root: object) -> Iterator[tuple[Keys, Any]]:
        """Yield the tensors in order, each with the keys that lead to it."""
        waiting: list[tuple[Keys, object]] = [((), root)]
        while waiting:
            keys, value = waiting.pop()
            self._visited += 1
            if isinstance(value, self._tensor):
                self._characters += sum(len(str(key)) for key in keys)
                yield keys, value
            below = [((*keys, key), one) for key, one in self._items(keys, value) if type(one) not in _PLAIN]
            many = self._visited + len(waiting) + len(below) > _MOST_VISITED or self._seen > _MOST_ITEMS
            if len(keys) > _DEEPEST or many or self._characters > _MOST_CHARACTERS:
                raise ValueError("it is nested too deeply, or holds too many values. Save a dict of tensors.")
            waiting.extend(reversed(below))

    def _items(self, keys: Keys, value: Any) -> Iterable[tuple[object, object]]:
        """Return what hangs on one value, with a key for each."""
        kind = type(value)
        if kind in _PLAIN:
            return ()
        if kind in (dict, OrderedDict, Counter, list, tuple, set):
            self._seen += len(value)
            if self._seen > _MOST_ITEMS:
                return ()
        if any(hasattr(kind, key) for key in getattr(value, "__dict__", ())):
            raise ValueError(f"'{shown(_dotted(keys))}' hides what it holds by attributes. Save a dict of tensors.")
        if kind in (dict, OrderedDict, Counter):
            if not all(type(key) in _KEYS for key in value):
                raise ValueError("it has keys that are neither text nor numbers. Save a dict of tensors.")
            return (*dict.items(value), *getattr(value, "__dict__", {}).items())
        if kind in (list, tuple, set):
            return enumerate(value)
        if kind in self._kinds:
            return (*vars(value).items(), *((name, getattr(value, name)) for name in ("grad", "_backward_hooks")))
        if kind in self._others:
            return ()
        raise ValueError(f"'{shown(_dotted(keys))}' is of type {kind.__name__}, into which gradclip does not look.")


def _dotted(keys: Keys) -> str:
    return ".".join(map(str, keys)) or THE_TENSOR


def _names(paths: list[Keys]) -> list[str]:
    """Return the keys with dots between them, or in brackets where {"a": {"b": ...}} and {"a.b": ...} were the same."""
    dotted = [_dotted(keys) for keys in paths]
    if len(set(dotted)) == len(dotted):
        return dotted
    found = ["".join(f"[{key!r}]" for key in keys) for keys in paths]
    if len(set(found)) < len(found):
        raise ValueError("two of its tensors have the same keys, or are items and attributes of one name.")
    return found


def _array(source: Source, name: str, tensor: "torch.Tensor", places: dict[int, Stored]) -> FileArray:
    why = _unread(tensor)
    if why:
        raise ValueError(f"'{shown(name)}' is {why}")
    kind = Dtype.named(bare_name(tensor.dtype))
    layout, item = MemoryLayout(tuple(tensor.shape), tuple(tensor.stride())), tensor.element_size()
    if not layout.size:
        return FileArray(name, kind, layout, PlainBytes(source, 0, 0))
    place = places.get(tensor.untyped_storage().data_ptr())
    first = tensor.storage_offset() * item
    if place is None or first + layout.span * item > place.size:
        raise ValueError(f"'{shown(name)}' is not stored in the file as it is loaded. Save a plain tensor.")
    return FileArray(name, kind, layout, PlainBytes(source, place.offset + first, layout.span * item))


def _unread(tensor: "torch.Tensor") -> str:
    """Say why a tensor is not read; nothing if it is."""
    import torch

    if tensor.is_quantized:
        return "a quantized tensor, which gradclip does not read. Save tensor.dequantize()."
    if tensor.layout is not torch.strided:
        return "a sparse tensor, which gradclip does not read. Save tensor.to_dense()."
    if tensor.is_nested:
        return "a nested tensor, which gradclip does not read. Save a list of tensors."
    if tensor.device.type != "cpu":
        return f"on the device {tensor.device.type}, so it has no values. Save real tensors."
    if tensor.is_conj() or tensor.is_neg():
        return "conjugated or negated later. Save tensor.resolve_conj().resolve_neg()."
    return ""


def _check_sum(arrays: list[FileArray], size: int) -> None:
    total = sum(x.layout.bytes_read(x.kind.raw.itemsize) for x in arrays)
    if total > _MOST_TIMES * size + _ALWAYS:
        raise ValueError(
            f"to read its tensors takes {total} bytes, but the file has {size}: they share or repeat "
            "storages, or lie apart. Save copies of the tensors, by tensor.clone()."
        )
