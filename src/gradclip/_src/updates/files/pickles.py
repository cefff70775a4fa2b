"""What PyTorch's checkpoints pickle, read without running anything: the operations that `weights_only=True` allows.

Names in the pickle become functions of ours that only take notes. A name that is not among them is an error.
https://docs.python.org/3/library/pickletools.html
"""

import struct
from collections.abc import Callable
from typing import Any

from gradclip._src.updates.files.stored import shown

MOST_BYTES = 1 << 24
_MOST_OPERATIONS = 1_500_000  # each makes at most one object, of at most 64 bytes; a tensor takes about 45
_LONGEST_KEY = 16  # items of a tuple


class Pickle:
    """One pickle that is being read: its bytes, the stack, and what was noted for later."""

    def __init__(self, data: bytes, names: "dict[str, Any]", persistent: Callable[[object], object]) -> None:
        self._data, self._place = data, 0
        self._names, self._persistent = names, persistent
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._left = _MOST_OPERATIONS

    def read(self) -> object:
        """Return the value. Raises ValueError, which says what is wrong."""
        if len(self._data) > MOST_BYTES:
            raise ValueError(f"its pickle has {len(self._data)} bytes. gradclip reads at most {MOST_BYTES}.")
        try:
            while True:
                self._spend(1)
                code = self._take(1)
                if code == b".":
                    return self._stack.pop()
                operation = _OPERATIONS.get(code)
                if operation is None:
                    raise ValueError(f"its pickle has the operation {code!r}, which torch.save does not write.")
                operation(self)
        except (IndexError, KeyError, TypeError, struct.error, UnicodeDecodeError, RecursionError):
            raise ValueError("its pickle is damaged.") from None

    def _spend(self, operations: int) -> None:
        self._left -= operations
        if self._left < 0:
            raise ValueError(f"its pickle has more than {_MOST_OPERATIONS} operations, more than gradclip reads.")

    def _take(self, size: int) -> bytes:
        found = self._data[self._place : self._place + size]
        if len(found) < size:
            raise ValueError("its pickle is cut off.")
        self._place += size
        return found

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._place)
        if end < 0:
            raise ValueError("its pickle is cut off.")
        return self._take(end + 1 - self._place)[:-1].decode()

    def _since_mark(self) -> list[Any]:
        found, self._stack = self._stack, self._outer.pop()
        return found

    def push(self, form: str) -> None:
        self._stack.append(self._number(form))

    def mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def text(self, form: str) -> None:
        self._stack.append(self._take(self._number(form)).decode("utf-8", "surrogatepass"))

    def short_bytes(self) -> None:
        self._stack.append(self._take(self._number("B")))

    def long(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._number("B")), "little", signed=True))

    def tuple_of(self, size: int) -> None:
        if len(self._stack) < size:
            raise IndexError
        self._stack[len(self._stack) - size :] = [tuple(self._stack[len(self._stack) - size :])]

    def marked_tuple(self) -> None:
        found = self._since_mark()
        self._stack.append(tuple(found))

    def put(self, form: str) -> None:
        self._memo[self._number(form)] = self._stack[-1]

    def get(self, form: str) -> None:
        self._stack.append(self._memo[self._number(form)])

    def append(self) -> None:
        self._extend([self._stack.pop()])

    def appends(self) -> None:
        self._extend(self._since_mark())

    def _extend(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise TypeError
        self._stack[-1].extend(items)

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def set_items(self) -> None:
        self._set(self._since_mark())

    def _set(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not dict:
            raise TypeError
        for key, value in zip(items[::2], items[1::2], strict=False):
            _check_key(key)
            if key in self._stack[-1]:
                raise ValueError(f"its pickle sets the key {shown(repr(key))} more than once.")
            self._stack[-1][key] = value

    def named(self) -> None:
        module, name = self._line(), self._line()
        path = f"{_RENAMED.get(module, module)}.{name}"
        if path not in self._names:
            raise ValueError(
                f"it holds {shown(path)}, which torch.load(weights_only=True) does not allow: it could run code. "
                "Load it where you trust it, and save a dict of tensors."
            )
        self._stack.append(self._names[path])

    def call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if type(arguments) is not tuple or not callable(function):
            raise TypeError
        # Functions copy what they are given, and the memo gives the same long list any number of times.
        self._spend(len(arguments) + sum(len(x) for x in arguments if isinstance(x, list | tuple | dict | str)))
        self._stack.append(function(*arguments))

    def build(self) -> None:
        """Drop the attributes of an object: an OrderedDict's `_metadata`, for example."""
        self._stack.pop()
        if type(self._stack[-1]) is not dict:
            raise ValueError("it holds objects with a state, which gradclip does not read. Save a dict of tensors.")

    def persistent(self) -> None:
        self._stack.append(self._persistent(self._stack.pop()))


def _check_key(key: object) -> None:
    """Raise ValueError for a key whose hash takes long, or that many other keys can share."""
    parts = key if type(key) is tuple else (key,)
    slow = any(type(x) is tuple or (type(x) is int and not -(1 << 63) <= x < 1 << 64) for x in parts)
    if slow or len(parts) > _LONGEST_KEY:
        raise ValueError("its pickle has a key of nested or long tuples, or of a huge integer. Name tensors by text.")


_RENAMED = {"__builtin__": "builtins"}  # Python 2's name, which pickles of torch.save use


def _constant(make: Callable[[], object]) -> Callable[[Pickle], None]:
    return lambda pickle: pickle._stack.append(make())


_OPERATIONS: dict[bytes, Callable[[Pickle], None]] = {
    b"\x80": lambda pickle: (pickle._take(1), None)[1],
    b"c": Pickle.named,
    b"R": Pickle.call,
    b"b": Pickle.build,
    b"Q": Pickle.persistent,
    b"(": Pickle.mark,
    b"t": Pickle.marked_tuple,
    b"\x85": lambda pickle: pickle.tuple_of(1),
    b"\x86": lambda pickle: pickle.tuple_of(2),
    b"\x87": lambda pickle: pickle.tuple_of(3),
    b"a": Pickle.append,
    b"e": Pickle.appends,
    b"s": Pickle.set_item,
    b"u": Pickle.set_items,
    b"N": _constant(lambda: None),
    b"\x88": _constant(lambda: True),
    b"\x89": _constant(lambda: False),
    b")": _constant(tuple),
    b"]": _constant(list),
    b"}": _constant(dict),
    b"J": lambda pickle: pickle.push("<i"),
    b"K": lambda pickle: pickle.push("B"),
    b"M": lambda pickle: pickle.push("<H"),
    b"G": lambda pickle: pickle.push(">d"),
    b"X": lambda pickle: pickle.text("<I"),
    b"U": Pickle.short_bytes,
    b"\x8a": Pickle.long,
    b"q": lambda pickle: pickle.put("B"),
    b"r": lambda pickle: pickle.put("<I"),
    b"h": lambda pickle: pickle.get("B"),
    b"j": lambda pickle: pickle.get("<I"),
}
