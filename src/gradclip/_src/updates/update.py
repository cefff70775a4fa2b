"""Check an update that a client has sent: whether it is acceptable, and if not, why."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from gradclip._src.annotations import Ord, Threshold
from gradclip._src.backends import whole_scalar
from gradclip._src.backends.framework import Framework
from gradclip._src.backends.host.arrays import HostArray
from gradclip._src.backends.on_host import framework_of
from gradclip._src.backends.registry import entries_of, entry_of, is_masked, is_traced, known, load, models_of
from gradclip._src.core.formats import bare_name
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.functional.norm_at_most import known_threshold
from gradclip._src.public import public
from gradclip._src.tree import FlatTree, flatten
from gradclip._src.updates.files import stored
from gradclip._src.updates.files.numpy_files import member_of
from gradclip._src.updates.files.stored import Stored
from gradclip._src.updates.judge import checked_order, judge
from gradclip._src.updates.verdict import Slot, Template, UpdateCheck, in_one_line, named, of_arrays, shown
from gradclip._src.words import typed

_MOST_VALUES = 1 << 21
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
    """Take the arrays of an open `.npz` file. Never unpickled, whatever the file was opened with."""
    if opened.zip is None:
        found.faults.append(f"{shown(prefix) if prefix else 'it'} is an .npz file that was closed")
        return
    for member in opened.zip.infolist():
        name = f"{prefix}[{member.filename.removesuffix('.npy')!r}]"
        try:
            found.arrays.append(replace(member_of(opened.zip, member, _refuse, owner=opened), name=name))
        except Exception as error:  # damaged, or no array
            found.faults.append(f"{shown(name)} cannot be read: {in_one_line(error)}")


def _refuse(why: str) -> NoReturn:
    raise ValueError(why)


def _not_an_array(leaf: object) -> str:
    """Say why a leaf is no array; nothing if it is one."""
    if is_masked(leaf):
        return "is a masked array"
    if type(leaf) in _OF_NUMBERS or known(leaf):
        return ""
    return f"is of type {stored.shown(type(leaf).__name__)}, not an array"


_OPEN_FIRST = (
    "Open the file first: numpy.load(path, allow_pickle=False) for .npz, safetensors.numpy.load_file(path) for "
    ".safetensors, torch.load(path, weights_only=True) for .pt. Or run gradclip check FILE --max-norm C in a shell, "
    "which reads files of any size piece by piece."
)
_TENSORS_FIRST = (
    "Pass the arrays: {name: file.get_tensor(name) for name in file.keys()}, or what load_file(path) returns."
)
_OF_FLOWER = (
    "Pass the arrays: flwr.common.parameters_to_ndarrays(parameters), or record.to_numpy_ndarrays() for an ArrayRecord."
)


@public
@with_subnormals
def check_update(tree: object, max_norm: Threshold, *, like: object = None, ord: Ord = 2) -> UpdateCheck:
    """Return whether an update is acceptable, with the reason: its norm is at most max_norm, and it is like a template.

    The norm is (sum |x|**p)**(1/p) over all arrays of floating-point or complex numbers. It is compared with
    `max_norm` without any rounding, as in `gradclip.norm_at_most`. An update is refused if its norm is larger, if it
    holds NaN, infinities or anything but arrays of numbers, or if it holds no floating-point numbers; with `like`, also
    if an array is missing, unknown, or of another shape or dtype. Whatever the update holds, the answer is a refusal,
    not an error.

    Args:
        tree: the update: nested containers of arrays of any framework, such as a state dict, Flower's list of arrays,
            what safetensors loads, or an open `.npz` file. Arrays on a device are copied to the host.
        max_norm: the threshold, >= 0: a number or a scalar array. Integers and fractions are not rounded.
        like: a tree with the names, shapes and dtypes that the update must have, such as the model's state dict. Its
            values are not read; `jax.ShapeDtypeStruct` will do. Without it any names, shapes and dtypes are accepted.
            Integers and booleans do not count in the norm, so a client may hide anything in them.
        ord: p: an integer from 1 to 8, `inf` for the largest magnitude, `-inf` for the smallest; None means 2. For
            complex numbers only 2, `inf` or `-inf`.

    Returns:
        An `UpdateCheck`, which is true in conditions if the update is acceptable.

    Raises:
        TypeError: the update is a path, a file object, an iterator, a model or Flower's `Parameters`; `like` holds
            anything but arrays; or `max_norm` is not a number.
        ValueError: `max_norm` is negative or NaN, `ord` is not one of the values above, `like` holds no arrays, or the
            call is traced (`jax.jit`, `torch.compile`), which hides the values.

    >>> import numpy as np
    >>> check_update({"w": np.array([3.0, 4.0])}, 5).reason
    'The norm 5 is at most 5.'
    >>> refused = check_update({"w": np.array([1, 1e-5], np.float32)}, 1)
    >>> refused.ok, refused.norm, f"{refused.excess:.1e}"
    (False, 1.00000000005, '5.0e-11')

    """
    order = checked_order(ord)
    if is_traced(max_norm):
        raise ValueError("max_norm is traced, so its value is not known. Call check_update outside jit.")
    known_threshold(whole_scalar(max_norm))
    template = None if like is None else template_of(like)
    _check_root(tree, "the update")
    found = taken(tree)
    check_not_traced(found.arrays)
    return judge(found.arrays, max_norm, order, template, faults=found.faults)


def template_of(like: object) -> Template:
    """Return the template that a tree is. Raises TypeError or ValueError if it is none."""
    _check_root(like, "like")
    slots, faults = _slots(like)
    if faults:
        raise TypeError(f"like must hold nothing but arrays, but {faults[0]}.")
    times = Counter(slot.name for slot in slots)
    twice = {name for name, count in times.items() if count > 1}
    if twice:
        raise ValueError(f"like has several arrays named {named(sorted(twice))}. Give them different names.")
    if not slots:
        raise ValueError("like holds no arrays. Pass a tree like the update, or leave it out to accept any arrays.")
    return slots


def _slots(like: object) -> tuple[list[Slot], list[str]]:
    if is_archive(like):
        found = taken(like)
        return of_arrays(found.arrays), found.faults
    try:
        flat = flatten(like)
    except Exception as error:
        raise TypeError(f"like must be a tree of arrays, which failed: {error}") from error
    slots, faults = [], []
    for path, leaf in zip(flat.paths(), whole_leaves(flat), strict=True):
        try:
            slots.append(Slot(path, *described(leaf)))
        except (AttributeError, TypeError, ValueError):
            faults.append(f"{path or 'it'} is of type {type(leaf).__name__}, without a dtype and a known shape")
    return slots, faults


def _check_root(tree: Any, what: str) -> None:
    """Raise a TypeError with the right call if a tree is something that only leads to arrays."""
    if isinstance(tree, str | bytes | os.PathLike) or (hasattr(tree, "read") and hasattr(tree, "seek")):
        raise TypeError(f"{what} must be a tree of arrays, got {typed(tree)}. {_OPEN_FIRST}")
    if type(tree).__module__.partition(".")[0] == "flwr":
        raise TypeError(f"{what} must be a tree of arrays, got Flower's {type(tree).__name__}. {_OF_FLOWER}")
    if type(tree).__name__ == "safe_open":
        raise TypeError(f"{what} must be a tree of arrays, got an open file of safetensors. {_TENSORS_FIRST}")
    if isinstance(tree, Iterator):
        raise TypeError(
            f"{what} must be a tree of arrays, got an iterator of type {type(tree).__name__}, which can be read only "
            "once. Pass dict(...) of names and arrays, or list(...) of arrays."
        )
    if models_of(tree) is not None:
        raise TypeError(
            f"{what} must be a tree of arrays, got a model of type {type(tree).__name__}. Pass model.state_dict()."
        )
