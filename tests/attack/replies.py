"""Replies of hostile clients, drawn at random: each change damages one of Flower's replies in one way."""

import math

import numpy as np
from flwr.app import Array, ArrayRecord

import hostile
from hostile import BROKEN, BROKEN_ARRAYS, HARMLESS, HARMLESS_ARRAYS, JUNK, UNLIKE, WEIGHT, with_metric

KNOWN = list((BROKEN | BROKEN_ARRAYS | HARMLESS | HARMLESS_ARRAYS | UNLIKE).values())
SHAPES = {"w": (2,), "b": (), "m": (2, 3), "e": (0, 3), "n": ()}
"""Of the arrays that servers send."""
DTYPES = ("float16", "float32", "float64", "int8", "int64", "uint64", "complex64", "bool", ">f4", ">f8", "U3", "O")


def change(rng):
    """Return a function that changes a reply in one to three ways."""
    made = [str(rng.choice(list(CHANGES))) for _ in range(int(rng.integers(1, 4)))]

    def changed(reply):
        for name in made:
            if not reply.has_error():
                reply = CHANGES[name](rng, reply) or reply
        return reply

    return changed


def number(rng):
    """Return what a metric may be told to be."""
    size = float(10.0 ** rng.uniform(-320, 308)) if rng.integers(2) else float(10.0 ** rng.uniform(-2, 3))
    odd = [0, 0.0, -0.0, 5e-324, -1, 1e300, 1.7e308, 10**300, 10**301, 10**5000, math.nan, math.inf, -math.inf]
    others = [True, "1", "", None, b"1", [], [1.0], [1, 2], [math.nan], ["1"], [[1]], {}, np.float64(2.0), np.array(3)]
    choices = [size, -size, round(min(size, 1e18)), *odd, *others]
    return choices[int(rng.integers(len(choices)))]


def _known(rng, reply):
    return KNOWN[int(rng.integers(len(KNOWN)))](reply)


def _metric(rng, reply):
    name = str(rng.choice([WEIGHT, WEIGHT, "loss", "norm_bit", "other", ""]))
    with_metric(name, number(rng))(reply)


def _any_array(rng, reply):
    """Return a record of arrays, and one of its names; nothing where none is left."""
    records = [record for record in reply.content.array_records.values() if len(record)]
    if not records:
        return None, None
    record = records[int(rng.integers(len(records)))]
    return record, str(rng.choice(list(record.keys())))


def _instead(make):
    """Return a change that puts something instead of one array."""

    def instead(rng, reply):
        record, name = _any_array(rng, reply)
        if name is not None:
            record[name] = make(rng, record[name], np.asarray(rng.standard_normal(SHAPES.get(name, (2,)))))

    return instead


def _long(rng, array, values):
    with np.errstate(all="ignore"):
        far = np.asarray(10.0 ** rng.uniform(-3, 308) * values)
        return Array(far.astype(str(rng.choice(["float16", "float32", "float64", "int64"]))))


def _not_finite(rng, array, values):
    made = values.astype(str(rng.choice(["float16", "float32", "float64"])))
    made.reshape(-1)[rng.integers(2, size=values.size) == 0] = rng.choice([math.nan, math.inf, -math.inf])
    return Array(made)


def _other_dtype(rng, array, values):
    with np.errstate(all="ignore"):
        return Array(array.dtype, array.shape, array.stype, _bytes(values.astype(str(rng.choice(DTYPES)))))


def _bytes(values):
    found = Array(np.zeros(1)) if values.dtype.kind == "O" else Array(np.asfortranarray(values))
    return found.data


def _other_shape(rng, array, values):
    shapes = [values.reshape(-1), values[..., None], values[None], np.zeros(0), np.zeros((3, 0, 5))]
    return Array(shapes[int(rng.integers(len(shapes)))].astype(str(rng.choice(["float32", "float64"]))))


def _other_bytes(rng, array, values):
    """Flip, cut, or add bytes, most often of the header."""
    data = bytearray(array.data)
    for _ in range(int(rng.integers(1, 5))):
        place = int(rng.integers(min(len(data), int(rng.choice([12, 128, 1 << 20]))) or 1))
        part = rng.bytes(int(rng.integers(3)))
        data[place : place + int(rng.integers(3))] = part
    if rng.integers(4) == 0:
        del data[int(rng.integers(len(data) + 1)) :]
    return Array(array.dtype, array.shape, array.stype, bytes(data))


def _other_words(rng, array, values):
    """Say something of the array that its bytes do not say."""
    dtype, stype = str(rng.choice(["float64", "", "O"])), str(rng.choice(["numpy.ndarray", "numpy.ndarray", "", "x"]))
    return Array(dtype, (10**9,), stype, array.data)


def _junk(rng, array, values):
    return JUNK[str(rng.choice(list(JUNK)))]


def _other_names(rng, reply):
    """Have an array more, one less, one under another name, or another order."""
    record, name = _any_array(rng, reply)
    if name is None:
        return
    way, array = int(rng.integers(4)), record[name]
    if way == 0:
        record["another"] = array
        return
    del record[name]
    if way > 1:
        record["another" if way == 2 else name] = array


def _no_arrays(rng, reply):
    for key in list(reply.content.array_records):
        reply.content[key] = ArrayRecord({})


CHANGES = {
    "known": _known,
    "metric": _metric,
    "weight": lambda rng, reply: with_metric(WEIGHT, number(rng))(reply),
    "unmoved": lambda rng, reply: hostile.unmoved(reply),
    "long": _instead(_long),
    "not finite": _instead(_not_finite),
    "dtype": _instead(_other_dtype),
    "shape": _instead(_other_shape),
    "bytes": _instead(_other_bytes),
    "words": _instead(_other_words),
    "junk": _instead(_junk),
    "names": _other_names,
    "no arrays": _no_arrays,
}
