"""What a call gave, to the last bit, as text: results, inputs afterwards, errors and warnings."""

import hashlib
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

HERE = str(Path(__file__).parent)
SHOWN = 6
"""Numbers of an array that are printed."""


def to_numpy(array):
    """Return an array of any framework as a NumPy array."""
    module = type(array).__module__.partition(".")[0]
    if module == "torch":
        import torch

        array = array.detach()
        if array.dtype is torch.bfloat16:
            return array.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return array.resolve_conj().resolve_neg().numpy()
    return np.asarray(array.numpy()) if module == "tensorflow" else np.asarray(array)


def with_one_nan(array):
    """Return the array with the same bits for each NaN: which ones a sum of several has is left to the hardware."""
    parts = array.copy().reshape(-1)
    if parts.dtype.kind == "c":
        parts = parts.view(parts.real.dtype)
    if parts.dtype.kind in "fV":
        parts[np.isnan(parts)] = np.nan
    return parts


def described_array(array):
    """Return the type, dtype, shape and bits of an array."""
    values = to_numpy(array)
    marks = [type(array).__name__, str(array.dtype).removeprefix("torch."), str(tuple(array.shape))]
    marks += [mark for mark in ("weak_type", "requires_grad") if getattr(array, mark, False)]
    return [" ".join(marks), with_one_nan(np.ascontiguousarray(values)).tobytes().hex()]


def described(value):
    """Return nested lists of text that are equal for equal results."""
    if isinstance(value, BaseException):
        return [f"{type(value).__name__}", without_places(str(value))]
    if value is None or isinstance(value, bool | int | float | complex | str):
        return [type(value).__name__, value.hex() if isinstance(value, float) and value == value else repr(value)]
    if hasattr(value, "dtype") and hasattr(value, "shape") and not is_sparse(value):
        return described_array(value)
    if isinstance(value, dict):
        return [type(value).__name__, [[str(key), described(one)] for key, one in value.items()]]
    if hasattr(value, "_fields"):
        return ["record", [[name, described(getattr(value, name))] for name in value._fields]]
    if isinstance(value, list | tuple):
        return [type(value).__name__, [described(one) for one in value]]
    if is_dataclass(value):
        return ["record", [[one.name, described(getattr(value, one.name))] for one in fields(value) if one.repr]]
    return [type(value).__name__, [described(one) for one in parts_of(value)]]


def is_sparse(array):
    return type(array).__name__ in ("BCOO", "BCSR", "IndexedSlices") or getattr(array, "is_sparse", False)


def parts_of(array):
    """Return the numbers and the places of a sparse array."""
    if type(array).__name__ == "Tensor":
        return [array._values(), array._indices(), str(array.is_coalesced()), str(tuple(array.shape))]
    names = [name for name in ("data", "values", "indices") if hasattr(array, name)]
    assert names, f"nothing is known about {type(array)}"
    return [getattr(array, name) for name in names]


def raised_here(error):
    """Say whether an error comes from the code of the oracle itself, not from a call of gradclip."""
    place = error.__traceback__
    while place.tb_next is not None:
        place = place.tb_next
    return place.tb_frame.f_code.co_filename.startswith(HERE)


def without_places(text):
    """Return the text of an error without addresses, and without the source around which TensorFlow puts it."""
    if text.startswith("in user code:"):
        text = text.strip().rpartition("\n\n")[2].strip()
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def described_warnings(told):
    """Return the warnings that point at the caller. Those of frameworks come once in a process."""
    return [[one.category.__name__, str(one.message)] for one in told if one.filename.startswith(HERE)]


def fingerprint(outcome):
    return hashlib.sha256(repr(outcome).encode()).hexdigest()[:16]


def shown(outcome, indent=0):
    """Return an outcome as lines that a person reads."""
    lines = []
    for one in outcome:
        if isinstance(one, list):
            lines += shown(one, indent + 1)
        elif len(lines) == 1 and (numbers := numbers_in(outcome)) is not None:
            lines.append("  " * indent + f"{numbers} {one[:48]} {fingerprint(one)}")
        else:
            lines.append("  " * indent + str(one))
    return lines


def numbers_in(described):
    """Return the first numbers of an array that was described, None for anything else."""
    try:
        dtype = described[0].split()[1]
        dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        return np.frombuffer(bytes.fromhex(described[1]), dtype)[:SHOWN].tolist()
    except (IndexError, TypeError, ValueError):
        return None
