"""A look at a checkpoint's pickle before PyTorch loads it: what it would take, and which storages it names, in order.

Nothing of the pickle runs: its names become objects that take notes.
"""

import io
import pickle
from collections.abc import Iterable, Sized
from typing import Any, ClassVar, NamedTuple

from gradclip._src.updates.files.stored import shown

MOST_BYTES = 1 << 24
_MOST_READS = 4_000_000  # an operation takes one to three, and makes at most one object, of some 64 bytes
_COPIES = 1 << 27  # bytes that copies of containers may take together
_ITEM_BYTES = 100  # of a dict
_LARGEST_KEY = (1 << 61) - 2  # the hashes of larger ones repeat
_UTILS = "torch._utils._rebuild_"
_REFUSED = {
    f"{_UTILS}wrapper_subclass": "a tensor of a subclass. Save plain tensors.",
    f"{_UTILS}device_tensor_from_numpy": "a tensor of another device. Save tensor.cpu().",
    f"{_UTILS}device_tensor_from_cpu_tensor": "a tensor of another device. Save tensor.cpu().",
}
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_WITH_STATE = (_FROM_TYPE, f"{_UTILS}parameter_with_state")
_CHANGED = "its pickle changes a tensor after it was made. Save plain tensors."
_TENSORS = ("torch._utils.", "torch._tensor.", "torch.nn.parameter.")
_ORDERED = "collections.OrderedDict"
_HASHING = {_ORDERED, "collections.Counter", "builtins.set", "__builtin__.set"}
_COPYING = {*_HASHING, "builtins.bytearray", "__builtin__.bytearray", "_codecs.encode", "torch.Size"}
_ITEM = {
    **dict.fromkeys(("ComplexDouble",), 16),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Char", "Byte", "Bool", "Untyped"), 1),
}


_OPERATIONS: Any = pickle._Unpickler.dispatch
_NAMES = (  # those that torch.load knows, but for the two that set items: `Survey` looks at their keys first
    "PROTO STOP GLOBAL REDUCE BUILD APPEND APPENDS MARK TUPLE TUPLE1 TUPLE2 TUPLE3 NONE NEWFALSE NEWTRUE EMPTY_TUPLE "
    "EMPTY_LIST EMPTY_DICT EMPTY_SET BININT BININT1 BININT2 BINFLOAT BINUNICODE SHORT_BINSTRING BINPERSID BINGET "
    "LONG_BINGET BINPUT LONG_BINPUT LONG1"
)


class Stored(NamedTuple):
    """Where something lies in the file, and how many bytes it has."""

    offset: int
    size: int


class _Named:
    """What a name in the pickle stands for, and what is made by calling it."""

    def __init__(self, survey: "Survey", name: str, items: int = 0) -> None:
        self._survey, self.name, self._items = survey, name, items

    def __call__(self, *given: Any) -> "_Named":
        if self.name in _REFUSED:
            raise ValueError(f"it holds {_REFUSED[self.name]}")
        if self.name == _FROM_TYPE:
            given[0](*given[2])
        if self.name in _WITH_STATE:
            _check_state(given[3])
        if self.name.endswith("Tensor"):
            raise ValueError("its pickle makes a tensor that is not stored in the file. Save it by torch.save.")
        items = sum(map(_items, given)) if self.name in _COPYING else 0
        self._survey.copy(items)
        if self.name in _HASHING:
            for one in given:
                _check_keys([x[0] if isinstance(x, tuple) and self.name == _ORDERED else x for x in one])
        return _Named(self._survey, f"{self.name}()", items)

    def __len__(self) -> int:
        return self._items

    def __setstate__(self, state: object) -> None:
        """Take no note of attributes: what is in them has been noted. Those of tensors must not change."""
        if self.name.startswith(_TENSORS):
            raise ValueError(_CHANGED)

    def __setitem__(self, key: object, value: object) -> None:
        self._items += 1


def _check_state(state: object) -> None:
    """Refuse attributes of a tensor that have a meaning, such as `data`: to set them changes its numbers."""
    import torch

    for part in state if isinstance(state, tuple) else (state,):
        keys = {} if part is None else part
        if not isinstance(keys, dict) or any(not isinstance(key, str) or hasattr(torch.Tensor, key) for key in keys):
            raise ValueError(_CHANGED)


def _items(value: object) -> int:
    """Return about how many bytes a copy takes. A number is that of the zeros of a bytearray."""
    if isinstance(value, int):
        return abs(value)
    each = 1 if isinstance(value, str | bytes) else _ITEM_BYTES
    return each * len(value) if isinstance(value, Sized) else 0


def _check_keys(keys: Iterable[object]) -> None:
    """Refuse keys that take long to hash, or of which many have one hash. A tensor has its address for a hash."""
    for key in keys:
        made = isinstance(key, _Named) and key.name.endswith("()") and not key.name.startswith(_TENSORS)
        if type(key) not in _KEYS or made or (isinstance(key, int) and abs(key) > _LARGEST_KEY):
            raise ValueError("it has keys that are neither text nor numbers below 2**61. Save a dict of tensors.")


_KEYS = {str, int, float, bytes, bool, type(None), _Named}


class _Counted(io.BytesIO):
    """The bytes of a pickle, which end an endless reader."""

    left = _MOST_READS

    def read(self, size: int | None = -1) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"its pickle has more than {_MOST_READS} parts, more than gradclip reads.")
        return super().read(size)


# The C unpickler takes memory for any number that the file gives to a note; the one in Python does not.
class Survey(pickle._Unpickler):
    """The look at one pickle."""

    dispatch: ClassVar[Any] = {
        getattr(pickle, name)[0]: _OPERATIONS[getattr(pickle, name)[0]] for name in _NAMES.split()
    }

    def __init__(self, data: bytes, folder: str, stored: dict[str, Stored]) -> None:
        super().__init__(_Counted(data), encoding="utf-8")
        self._folder, self._stored, self._copied = folder, stored, 0
        self.in_order: dict[str, Stored] = {}  # the storages that the pickle names, as they are loaded

    def check(self) -> None:
        """Read the pickle. Raises ValueError, which says what is wrong."""
        try:
            self.load()
        except (ValueError, MemoryError):
            raise
        except KeyError:
            raise ValueError(
                "its pickle has an operation that torch.load(weights_only=True) does not know. Save it by torch.save, "
                "with its own pickle_protocol."
            ) from None
        except Exception:  # whatever damaged bytes lead to
            raise ValueError("its pickle is damaged.") from None

    def copy(self, items: int) -> None:
        """Note that so many items are copied: a short pickle could ask for many copies of a long value."""
        self._copied += items
        if self._copied > _COPIES:
            raise ValueError("it is nested too deeply, or holds too many values. Save a dict of tensors.")

    def load_setitem(self: Any) -> None:
        """Look at the key first."""
        _check_keys([self.stack[-2]])
        _OPERATIONS[pickle.SETITEM[0]](self)

    def load_setitems(self: Any) -> None:
        """Look at the keys first."""
        _check_keys(self.stack[::2])
        _OPERATIONS[pickle.SETITEMS[0]](self)

    # To make an object, NEWOBJ, is to call its class, REDUCE.
    dispatch |= {
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.NEWOBJ[0]: _OPERATIONS[pickle.REDUCE[0]],
    }

    def find_class(self, module: str, name: str) -> _Named:
        return _Named(self, f"{module}.{name}")

    def persistent_load(self, given: Any) -> _Named:
        """Take note of a storage. The first that has a key is the one that is loaded for it."""
        if not (isinstance(given, tuple) and len(given) == 5 and given[0] == "storage"):
            raise ValueError("its pickle names something other than a storage.")
        _, kind, key, _, elements = given
        if not (isinstance(kind, _Named) and isinstance(key, str) and type(elements) is int):
            raise ValueError("its pickle describes a storage by values of a wrong type.")
        if key not in self.in_order:
            place = self._stored.get(f"{self._folder}/data/{key}".lower())
            if place is None:
                raise ValueError(f"the storage '{shown(key)}' is missing. It is damaged.")
            dtype = kind.name.rpartition(".")[2].removesuffix("Storage")
            if dtype in _ITEM and elements * _ITEM[dtype] != place.size:
                raise ValueError(
                    f"its pickle promises {elements} elements of {shown(dtype)} in the storage '{shown(key)}', "
                    f"which has {place.size} bytes. It is damaged."
                )
            self.in_order[key] = place
        return _Named(self, "storage")
