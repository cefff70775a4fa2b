"""What the libraries that write files load from them: all numbers, wherever they are, to compare with what was read."""

import warnings
from collections import Counter
from contextlib import nullcontext
from functools import reduce
from typing import NamedTuple

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
from torch.utils.serialization import config

from gradclip._src.backends.host.arrays import as_float
from gradclip._src.updates.files import FileError, open_file
from gradclip._src.updates.measured import counts, left_out

WIDE = {torch.float32, torch.float64, torch.complex64, torch.complex128}
HIDDEN = ("grad", "_backward_hooks")


class Summary(NamedTuple):
    """What is compared of an array: the number of elements, their sum, that of their squares, and the largest."""

    size: int
    total: complex
    squares: float
    largest: float

    @classmethod
    def of(cls, numbers):
        """Summarize an array. What it repeats along an axis without a stride is read once."""
        once = numbers[tuple(slice(None if stride else 1) for stride in numbers.strides)]
        times = numbers.size // max(1, once.size)
        sizes = np.abs(once.astype(np.complex128))
        sums = complex(once.astype(np.complex128).sum()), float((sizes**2).sum())
        return cls(numbers.size, *(times * x for x in sums), float(sizes.max(initial=0.0)))

    def joined(self, other):
        rest = max(self.largest, other.largest)
        return Summary(self.size + other.size, self.total + other.total, self.squares + other.squares, rest)


def by_torch(path):
    return map(_numbers_of, _tensors(torch.load(path, "cpu", weights_only=True)))


def by_torch_mapped(path):
    return map(_numbers_of, _tensors(torch.load(path, "cpu", weights_only=True, mmap=True)))


def by_torch_with_offsets(path):
    """Load with offsets that are computed instead of looked up."""
    with config.patch({"load.calculate_storage_offsets": True}):
        return by_torch_mapped(path)


def by_safetensors(path):
    return _numbers(safetensors.numpy.load_file(path).values())


def by_safetensors_for_torch(path):
    return map(_numbers_of, _tensors(safetensors.torch.load_file(path)))


def by_numpy(path):
    """Load an array, or each array of an archive by its name."""
    found = np.load(path, allow_pickle=False)
    with found if isinstance(found, np.lib.npyio.NpzFile) else nullcontext():
        yield from _numbers(dict(found).values() if hasattr(found, "files") else [found])


def by_numpy_mapped(path):
    return _numbers([np.load(path, mmap_mode="r")])


def by_numpy_with_full_names(path):
    """Load each array of an archive by the name of its member."""
    with np.load(path, allow_pickle=False) as found:
        yield from _numbers([found[name] for name in found.zip.namelist()])


def outcome(load, path):
    """Return what a loader gives, as a list, or its error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [x if isinstance(x, Summary) else Summary.of(x) for x in load(path)]
        except Exception as error:  # whatever a loader raises
            return error


def read(path):
    """Return the summaries of what gradclip reads."""
    with open_file(path) as file:
        found = [x for x in file.arrays if not left_out(x.dtype)]
        others = [x.name for x in found if not counts(x.dtype)]
        if others:  # whoever judges a file refuses them
            raise FileError(f"{path}: {others} are not measured.")
        return [_of_pieces(x) for x in found]


def _numbers_of(x):
    """Return the numbers of a tensor for NumPy, which has no dtypes of 8 bits and no bfloat16."""
    x = x.detach()
    x = x.to_dense() if x.is_sparse or x.layout is not torch.strided else x
    x = x.dequantize() if x.is_quantized else x
    wide = x if x.dtype in WIDE else x.to(torch.float64)
    return wide.resolve_conj().resolve_neg().numpy()


def _of_pieces(x):
    parts = (Summary.of(as_float(piece.data, piece.dtype)) for piece in x.pieces())
    return reduce(Summary.joined, parts, Summary.of(np.empty(0)))


def _numbers(found):
    """Yield the numbers of arrays that are neither integers nor text, each field for itself."""
    for x in found:
        if isinstance(x, np.ndarray) and x.dtype.names:
            yield from _numbers(x[name] for name in x.dtype.names)
        elif isinstance(x, np.ndarray) and not left_out(x.dtype.name) and x.dtype.kind not in "USmMV":
            yield x


def _tensors(root):
    """Yield each tensor that can be reached, once."""
    waiting, seen = [root], {}
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.storage.TypedStorage | torch.UntypedStorage):
            value = _of_storage(value)
        if isinstance(value, torch.Tensor) and value.is_nested:
            waiting.extend(value.unbind())
        elif isinstance(value, torch.Tensor) and not left_out(str(value.dtype).removeprefix("torch.")):
            yield value
        waiting.extend(_below(value))


def _of_storage(stored):
    untyped = stored.untyped() if isinstance(stored, torch.storage.TypedStorage) else stored
    return torch.empty(0, dtype=getattr(stored, "dtype", torch.uint8)).set_(untyped)


def _below(value):
    if isinstance(value, dict):
        yield from dict.keys(value)
        yield from dict.values(value)
    if isinstance(value, list | tuple | set | frozenset):
        yield from value
    if isinstance(value, torch.Tensor):
        yield from (getattr(value, name) for name in HIDDEN)
    yield from vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()


def same(loaded, measured):
    """Say whether each loaded tensor was measured, and nothing else. Shared ones may be measured more than once."""
    if isinstance(loaded, Exception) or isinstance(measured, Exception):
        return False
    return not Counter(loaded) - Counter(measured) and set(measured) <= set(loaded)
