"""PyTorch's checkpoints: a zip archive of a pickle that describes tensors, and of their storages, stored as they are.

Read without PyTorch: nothing of the pickle runs, as with `torch.load(weights_only=True)`, and storages stay in the
file until pieces of them are read. PyTorch alone takes more memory than a file may take here.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from gradclip._src.updates.files.arrays import FileArray, PlainBytes
from gradclip._src.updates.files.dtypes import Dtype
from gradclip._src.updates.files.layout import MemoryLayout
from gradclip._src.updates.files.pickles import MOST_BYTES, Pickle
from gradclip._src.updates.files.source import Source
from gradclip._src.updates.files.stored import shown
from gradclip._src.updates.files.zips import STORED, Member, MemberBytes

THE_TENSOR = "array"  # the name of a tensor that is alone in its file
_PICKLE = "/data.pkl"
_MOST_AXES, _MOST_ELEMENTS = 64, 1 << 62
_MOST_TIMES = 16  # as long as the file, for tensors that share storages
_ALWAYS = 1 << 26  # bytes
_DEEPEST, _MOST_VISITED, _MOST_ITEMS, _MOST_CHARACTERS = 100, 300_000, 3_000_000, 1 << 24
_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Bool": "bool",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Byte": "uint8",
}
_UNTYPED = Dtype.named("uint8")


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """A storage in the file, and the dtype of what it holds."""

    kind: Dtype
    member: Member


@dataclass(frozen=True, slots=True, eq=False)
class _Tensor:
    """A tensor: which elements of a storage it has."""

    storage: _Storage
    kind: Dtype
    first: int
    layout: MemoryLayout


@dataclass(frozen=True, slots=True, eq=False)
class _Other:
    """Something that is no tensor. If it holds numbers, `what` says why they cannot be read."""

    what: str = ""


def is_checkpoint(members: list[Member]) -> bool:
    """Say whether the members of an archive are those of a checkpoint."""
    return any(one.name.endswith(_PICKLE) for one in members)


def read(source: Source, members: list[Member]) -> list[FileArray]:
    """Return the tensors of a checkpoint, named by the keys that lead to them."""
    return _Checkpoint(source, members).arrays()


class _Checkpoint:
    """A checkpoint that is being read."""

    def __init__(self, source: Source, members: list[Member]) -> None:
        self._source = source
        self._members = {one.name: one for one in members}
        pickles = [one for one in members if one.name.endswith(_PICKLE)]
        self._pickle = pickles[0]
        self._folder = self._pickle.name.removesuffix(_PICKLE)
        if len(pickles) > 1 or "/" in self._folder or f"{self._folder}/constants.pkl" in self._members:
            source.refuse("it is a TorchScript archive, not a checkpoint of torch.save. Save model.state_dict().")
        order = self._members.get(f"{self._folder}/byteorder")
        self._big = order is not None and self._text(order) == b"big"

    def arrays(self) -> list[FileArray]:
        try:
            root = Pickle(self._text(self._pickle), _names(), self._storage).read()
            found = list(_tensors(root))
            self._check_sum(x for _, x in found)
            dotted = [".".join(map(str, path)) or THE_TENSOR for path, _ in found]
            if len(set(dotted)) < len(dotted):
                # The keys of all names in brackets tell {"a": {"b": ...}} from {"a.b": ...}, and 1 from "1".
                dotted = ["".join(f"[{key!r}]" for key in path) for path, _ in found]
            return [self._array(name, x) for name, (_, x) in zip(dotted, found, strict=True)]
        except ValueError as error:
            self._source.refuse(str(error).removeprefix(f"{self._source.shown}: "))

    def _text(self, member: Member) -> bytes:
        if member.size > MOST_BYTES:
            self._source.refuse(f"'{shown(member.name)}' has {member.size} bytes. gradclip reads at most {MOST_BYTES}.")
        return b"".join(piece.tobytes() for piece in MemberBytes(self._source, member).ranges(1 << 16))

    def _storage(self, given: object) -> _Storage:
        """Return the storage that the pickle names."""
        if not (isinstance(given, tuple) and len(given) == 5 and given[0] == "storage"):
            raise ValueError("its pickle names something other than a storage.")
        _, kind, key, _, elements = given
        if isinstance(kind, _Named):
            kind = kind.kind
        if not isinstance(kind, Dtype) or not isinstance(key, str) or type(elements) is not int:
            raise ValueError("its pickle describes a storage by values of a wrong type.")
        member = self._members.get(f"{self._folder}/data/{key}")
        if member is None or member.method != STORED:
            raise ValueError(f"the storage '{shown(key)}' is missing, or compressed. Save it by torch.save.")
        if not 0 <= elements * kind.raw.itemsize <= member.size:
            raise ValueError(
                f"its pickle promises {elements} elements of {kind.name} in the storage '{shown(key)}', which has "
                f"{member.size} bytes. It is damaged."
            )
        return _Storage(kind, member)

    def _array(self, name: str, tensor: _Tensor) -> FileArray:
        kind, place = tensor.kind, tensor.storage.member
        item = kind.raw.itemsize
        if tensor.layout.size and (tensor.first + tensor.layout.span) * item > place.size:
            raise ValueError(f"'{shown(name)}' ends outside of its storage. It is damaged.")
        if self._big:
            kind = Dtype(kind.name, kind.raw.newbyteorder(">"))
        size = tensor.layout.span * item
        return FileArray(name, kind, tensor.layout, PlainBytes(self._source, place.offset + tensor.first * item, size))

    def _check_sum(self, tensors: Iterator[_Tensor]) -> None:
        total = sum(x.layout.bytes_read(x.kind.raw.itemsize) for x in tensors)
        if total > _MOST_TIMES * self._source.size + _ALWAYS:
            raise ValueError(
                f"to read its tensors takes {total} bytes, but the file has {self._source.size}: they share or repeat "
                "storages, or lie apart. Save copies of the tensors, by tensor.clone()."
            )


def _tensors(root: object) -> Iterator[tuple[tuple[object, ...], _Tensor]]:
    """Yield all tensors below a value, in order, each with the keys that lead to it."""
    waiting: list[tuple[tuple[object, ...], object]] = [((), root)]
    visited = seen = characters = 0
    while waiting:
        path, value = waiting.pop()
        visited += 1
        if isinstance(value, _Tensor):
            characters += sum(len(str(key)) for key in path)
            yield path, value
        if isinstance(value, _Other) and value.what:
            raise ValueError(f"'{shown('.'.join(map(str, path)))}' is {value.what}")
        seen += len(value) if isinstance(value, dict | list | tuple) else 0
        items = _items(value) if seen <= _MOST_ITEMS else ()
        below = [((*path, key), one) for key, one in items if isinstance(one, dict | list | tuple | _Tensor | _Other)]
        many = visited + len(waiting) + len(below) > _MOST_VISITED or seen > _MOST_ITEMS
        if len(path) > _DEEPEST or many or characters > _MOST_CHARACTERS:
            raise ValueError("it is nested too deeply, or holds too many values. Save a dict of tensors.")
        if any(not isinstance(keys[-1], str | int | float | bytes | None) for keys, _ in below):
            raise ValueError("it has keys that are neither text nor numbers. Save a dict of tensors.")
        waiting.extend(reversed(below))


def _items(value: object) -> Iterable[tuple[object, object]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


@dataclass(frozen=True, slots=True, eq=False)
class _Named:
    """A dtype, or a class of storages of that dtype, that the pickle names."""

    kind: Dtype


def _tensor(storage: object, first: object, shape: object, strides: object, *rest: object) -> _Tensor:
    """Rebuild a tensor, as `torch._utils._rebuild_tensor_v2` does."""
    if not isinstance(storage, _Storage):
        raise TypeError
    return _rebuilt(storage, storage.kind, first, shape, strides, rest[2] if len(rest) > 2 else None)


def _tensor_of_dtype(
    storage: object, first: object, shape: object, strides: object, _grad: object, _hooks: object, *rest: object
) -> _Tensor:
    """Rebuild a tensor whose dtype is given, as `torch._utils._rebuild_tensor_v3` does."""
    if not isinstance(storage, _Storage) or not isinstance(rest[0], _Named):
        raise TypeError
    return _rebuilt(storage, rest[0].kind, first, shape, strides, rest[1] if len(rest) > 1 else None)


def _rebuilt(
    storage: _Storage, kind: Dtype, first: object, shape: object, strides: object, metadata: object
) -> _Tensor:
    if not isinstance(shape, tuple | list) or not isinstance(strides, tuple | list):
        raise TypeError
    if len(shape) != len(strides) or len(shape) > _MOST_AXES:
        raise ValueError(f"its pickle has a tensor with {len(shape)} lengths and {len(strides)} strides.")
    if not all(type(x) is int and 0 <= x < _MOST_ELEMENTS for x in (first, *shape, *strides)):
        raise ValueError("its pickle has a tensor whose shape or strides are no integers >= 0.")
    if math.prod(n for n in shape if n) > _MOST_ELEMENTS:
        raise ValueError(f"its pickle has a tensor of the impossible shape {shown(shape)}.")
    if isinstance(metadata, dict) and (metadata.get("conj") or metadata.get("neg")):
        raise ValueError("it holds a tensor that is conjugated or negated later. Save tensor.resolve_conj().")
    return _Tensor(storage, kind, cast(int, first), MemoryLayout(tuple(shape), tuple(strides)))


def _first(tensor: object, *_: object) -> object:
    """Return the tensor itself: parameters, and tensors with attributes."""
    return tensor


def _from_type(function: Callable[..., object], _type: object, arguments: object, _state: object) -> object:
    if not isinstance(arguments, tuple):
        raise TypeError
    return function(*arguments)


# Nothing is copied: a short pickle could ask for many copies of a long value.
def _dict(given: object = None) -> dict[object, object]:
    if given is not None and not isinstance(given, dict):
        raise TypeError
    return {} if given is None else given


def _size(given: object) -> tuple[object, ...]:
    if not isinstance(given, tuple):
        raise TypeError
    return given


def _nothing(*_: object) -> _Other:
    return _Other()


def _unread(what: str) -> Callable[..., _Other]:
    return lambda *_: _Other(what)


def _names() -> dict[str, object]:
    """Return what each name means that a pickle may hold."""
    utils = "torch._utils._rebuild_"
    return {
        **{f"torch.{name}Storage": _Named(Dtype.named(dtype)) for name, dtype in _STORAGES.items()},
        **{f"torch.{name}": _Named(Dtype.named(name)) for name in _DTYPES},
        "torch.storage.UntypedStorage": _Named(_UNTYPED),
        f"{utils}tensor": _tensor,
        f"{utils}tensor_v2": _tensor,
        f"{utils}tensor_v3": _tensor_of_dtype,
        f"{utils}parameter": _first,
        f"{utils}parameter_with_state": _first,
        f"{utils}device_tensor_from_cpu_tensor": _first,
        "torch._tensor._rebuild_from_type_v2": _from_type,
        f"{utils}sparse_tensor": _unread("a sparse tensor, which gradclip does not read. Save tensor.to_dense()."),
        f"{utils}qtensor": _unread("a quantized tensor, which gradclip does not read. Save tensor.dequantize()."),
        f"{utils}nested_tensor": _unread("a nested tensor, which gradclip does not read. Save a list of tensors."),
        f"{utils}meta_tensor_no_storage": _unread("on the device meta, so it has no values. Save real tensors."),
        f"{utils}wrapper_subclass": _unread(
            "of a subclass of Tensor, which gradclip does not read. Save plain tensors."
        ),
        "collections.OrderedDict": _dict,
        "collections.Counter": _dict,
        "torch.Size": _size,
        "torch.Tensor": _Other(),
        "torch.nn.parameter.Parameter": _Other(),
        **dict.fromkeys(
            (
                *("torch.device", "torch.serialization._get_layout", "_codecs.encode"),
                *("builtins.set", "builtins.bytearray", "builtins.complex"),
                *("torch.per_tensor_affine", "torch.per_channel_affine", "torch.per_tensor_symmetric"),
                *("torch.per_channel_symmetric", "torch.per_channel_affine_float_qparams"),
            ),
            _nothing,
        ),
    }
