"""The arrays of a tree that others have sent. Whatever it holds becomes an array or a fault in words: no error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy

from gradclip._src.backends.framework import Framework
from gradclip._src.backends.host.arrays import HostArray
from gradclip._src.backends.on_host import framework_of
from gradclip._src.backends.registry import entries_of, entry_of, is_masked, is_traced, known, load
from gradclip._src.checks.verdict import in_one_line, shown
from gradclip._src.core.formats import bare_name
from gradclip._src.files import stored
from gradclip._src.files.stored import Stored
from gradclip._src.tree import FlatTree, flatten

_MOST_VALUES = 1 << 21
_PIECE = 1 << 19  # bytes of a member of an archive that are read at a time
_MOST_REPEATED = 1 << 28  # elements of an array that holds some of them again and again, as `expand` makes it
_OF_NUMBERS = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}


class UpdateArrays(NamedTuple):
    """The arrays of a tree, and for each of its other leaves a fault in words."""

    arrays: list[Stored]
    faults: list[str]


@dataclass(frozen=True)
class InMemory:
    """An array of any framework, or a Python number."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    leaf: Any

    def pieces(self) -> Iterator[HostArray]:
        """Yield the array in host memory."""
        if type(self.leaf) in _OF_NUMBERS:
            yield HostArray.of(np.asarray(self.leaf))
            return
        framework = framework_of(self.leaf)
        # No norm supports float8, but float32 holds the same numbers.
        yield framework.on_host(framework.as_float(self.leaf) if self.dtype.startswith("float8_") else self.leaf)


@dataclass(frozen=True)
class NpzArray:
    """An array of an open `.npz` file. Never unpickled, whatever the file was opened with."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    opened: Any
    path: str

    def pieces(self) -> Iterator[HostArray]:
        """Read the array piece by piece, in the order of memory."""
        with self.opened.zip.open(self.path) as file:
            shape, dtype = _header(file)
            if dtype.hasobject:
                raise ValueError(
                    "it holds Python objects, which are pickled. No pickles are read: they could run code."
                )
            count = math.prod(shape)
            most = max(1, _PIECE // max(1, dtype.itemsize))
            for start in range(0, count, most):
                size = min(most, count - start) * dtype.itemsize
                data = file.read(size)
                if len(data) < size:
                    raise ValueError("it ends before all numbers that its header promises.")
                yield HostArray.of(np.frombuffer(data, dtype))
            if file.read(1):  # also checks the sum over all bytes
                raise ValueError("it holds more than its header says.")

    @classmethod
    def of(cls, name: str, opened: Any, path: str) -> NpzArray:
        """Return a member of an archive, by its header. Raises ValueError if that promises more than there is."""
        with opened.zip.open(path) as file:
            shape, dtype = _header(file)
            if math.prod(shape) * dtype.itemsize > opened.zip.getinfo(path).file_size:
                raise ValueError("its header promises more numbers than there are.")
        return cls(name, bare_name(dtype), shape, opened, path)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and the dtype of an array in a file, which then stands where the array begins."""
    version = npy.read_magic(file)
    shape, _, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(file)
    return shape, dtype


def taken(tree: object) -> UpdateArrays:
    """Return what a tree holds."""
    found = UpdateArrays([], [])
    _take(tree, "", found)
    return found


def is_archive(value: object) -> bool:
    """Say whether a value is an open `.npz` file of NumPy."""
    return isinstance(value, np.lib.npyio.NpzFile)


def described(leaf: Any) -> tuple[str, tuple[int, ...]]:
    """Return the bare dtype and the shape of an array, of a Python number, or of what has a dtype and a shape."""
    if type(leaf) in _OF_NUMBERS:
        return _OF_NUMBERS[type(leaf)], ()
    return bare_name(leaf.dtype), tuple(int(length) for length in leaf.shape)


def whole_leaves(flat: FlatTree) -> list[Any]:
    """Return the leaves as they were passed in: sparse arrays with their own dtypes and shapes."""
    return [flat.sparse.get(place, leaf) for place, leaf in enumerate(flat.leaves)]


def check_not_traced(arrays: Sequence[Stored]) -> None:
    """Raise a ValueError if arrays have no values because the call is traced."""
    leaves = [x.leaf for x in arrays if isinstance(x, InMemory)]
    for entry in entries_of(leaves):
        own = [leaf for leaf in leaves if entry_of(leaf) is entry]
        if any(map(is_traced, own)) or _hidden(load(entry), own):
            raise ValueError(
                "check_update needs the values of the arrays, which a traced call does not have. Call it outside jit, "
                "vmap and torch.compile."
            )


def _hidden(framework: Framework, leaves: Sequence[Any]) -> bool:
    try:
        return not framework.backend(leaves, ()).visible
    except Exception:  # an array that has been deleted, for example, which reading it will find
        return False


def _take(tree: object, prefix: str, found: UpdateArrays) -> None:
    if is_archive(tree):
        _take_archive(tree, prefix, found)
        return
    try:
        if _holds_too_many(tree):
            raise ValueError(f"it holds more than {_MOST_VALUES} values, some of them perhaps again and again.")
        flat = flatten(tree)
        paths = flat.paths()
        whole = whole_leaves(flat)
    except Exception as error:  # too deep, keys that cannot be sorted, or nodes that fail
        found.faults.append(f"{shown(prefix) if prefix else 'the update'} is no tree of arrays: {in_one_line(error)}")
        return
    for path, leaf, elements in zip(paths, whole, flat.leaves, strict=True):
        _take_leaf(leaf, elements, f"{prefix}{path}", found)


def _holds_too_many(tree: object) -> bool:
    """Say whether a tree is too large: lists that hold a list twice, which holds a list twice, have no end."""
    waiting, count = [tree], 0
    while waiting and count <= _MOST_VALUES:
        value = waiting.pop()
        below = dict.values(value) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        count += len(below)
        waiting.extend(x for x in below if isinstance(x, dict | list | tuple))
    return count > _MOST_VALUES


def _take_leaf(leaf: Any, elements: Any, name: str, found: UpdateArrays) -> None:
    try:
        if isinstance(leaf, Mapping) and not known(leaf):
            _take(leaf if is_archive(leaf) else {key: leaf[key] for key in leaf}, name, found)
            return
        wrong = _not_an_array(leaf) if elements is leaf else ""
        if wrong:
            found.faults.append(f"{shown(name) if name else 'it'} {wrong}")
            return
        if type(leaf) is not np.ndarray and isinstance(leaf, np.ndarray):
            leaf = elements = np.asarray(leaf)  # a subclass may say anything about itself
        dtype, shape = described(leaf)
        if math.prod(shape) > _MOST_REPEATED and _repeats(leaf, shape):
            found.faults.append(
                f"{shown(name)} repeats its elements up to {math.prod(shape):,} numbers, too many to read"
            )
            return
        found.arrays.append(InMemory(name, dtype, shape, elements))
    except Exception as error:  # whatever an object of an update may raise
        found.faults.append(f"{shown(name)} cannot be read: {in_one_line(error)}")


def _repeats(leaf: Any, shape: tuple[int, ...]) -> bool:
    """Say whether an array of NumPy or PyTorch has elements that share memory."""
    strides = leaf.strides if isinstance(leaf, np.ndarray) else leaf.stride() if hasattr(leaf, "stride") else ()
    return any(not d and n > 1 for d, n in zip(strides, shape, strict=False))


def _take_archive(opened: Any, prefix: str, found: UpdateArrays) -> None:
    for path in opened.zip.namelist() if opened.zip is not None else opened.files:
        name = f"{prefix}[{path.removesuffix('.npy')!r}]"
        try:
            found.arrays.append(NpzArray.of(name, opened, path))
        except Exception as error:  # closed, damaged, or no array
            found.faults.append(f"{shown(name)} cannot be read: {in_one_line(error)}")


def _not_an_array(leaf: object) -> str:
    """Say why a leaf is no array; nothing if it is one."""
    if is_masked(leaf):
        return "is a masked array"
    if type(leaf) in _OF_NUMBERS or known(leaf):
        return ""
    return f"is of type {stored.shown(type(leaf).__name__)}, not an array"
