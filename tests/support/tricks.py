"""Checkpoints whose pickles hide weights from a reader that does not read them as PyTorch does."""

from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any

import numpy as np

from hand_pickled import (
    EMPTY,
    LARGE,
    REBUILD,
    SMALL,
    UTILS,
    build,
    call,
    checkpoint,
    dtype,
    get,
    named,
    numbers,
    op,
    parts,
    put,
    storage,
    tensor,
)

THE_SAME, ANY = object(), object()


@dataclass
class Trick:
    """A file, and what each loader gives: the largest absolute value of all its tensors, or an error's class.

    `by_offsets` is what PyTorch gives with mmap=True and offsets that it computes instead of looking them up.
    `usual`: such files are written by `torch.save`, so they are read. `refused`: nobody knows what they hold.
    """

    data: bytes
    plain: Any
    mapped: Any = THE_SAME
    by_offsets: Any = THE_SAME
    usual: bool = False
    refused: bool = False

    def __post_init__(self):
        self.mapped = self.plain if self.mapped is THE_SAME else self.mapped
        self.by_offsets = self.mapped if self.by_offsets is THE_SAME else self.by_offsets


TENSOR, PARAMETER = named("torch", "Tensor"), named("torch.nn.parameter", "Parameter")
ORDERED, COUNTER = named("collections", "OrderedDict"), named("collections", "Counter")
SET, SIZE = named("__builtin__", "set"), named("torch", "Size")
FROM_TYPE = named("torch._tensor", "_rebuild_from_type_v2")
WITH_STATE, AS_PARAMETER = named(UTILS, "_rebuild_parameter_with_state"), named(UTILS, "_rebuild_parameter")
SUBCLASS, SPARSE = named(UTILS, "_rebuild_wrapper_subclass"), named(UTILS, "_rebuild_sparse_tensor")
TO_DTYPE = named(UTILS, "_rebuild_device_tensor_from_cpu_tensor")
UNTYPED = {"kind": "UntypedStorage", "module": "torch.storage"}


def with_state(state, x=SMALL):
    return call(WITH_STATE, x, False, {}, state)


def of_type(state, kind=TENSOR, **x):
    return call(FROM_TYPE, REBUILD, kind, parts(**x), state)


def new(kind, *arguments):
    """Push what the class's `__new__` returns."""
    return kind + op(arguments) + b"\x81"


def of_dtype(stored, kind, shape=(4,), strides=(1,), first=0):
    return call(named(UTILS, "_rebuild_tensor_v3"), stored, first, shape, strides, False, EMPTY, dtype(kind))


def layout(name):
    return call(named("torch.serialization", "_get_layout"), f"torch.{name}")


def sparse(name, *parts):
    return call(SPARSE, layout(name), parts)


def twice(depth):
    """Push a list that has one list two times, which has one list two times, and so on."""
    return op([put(0, twice(depth - 1) if depth else SMALL), get(0)])


def filled(x, key, value):
    """Push a dict that has got one more item."""
    return op(x) + op(key) + op(value) + b"s"


def held(w, **records):
    return checkpoint({"w": w}, **records)


STATES = {
    "data behind a type": Trick(held(of_type({"data": LARGE})), 1e6),
    "data behind a type, as a slot": Trick(held(of_type((None, {"data": LARGE}))), 1e6),
    "data behind a parameter": Trick(held(with_state({"data": LARGE})), 1e6),
    "data of another shape": Trick(held(with_state({"data": tensor("1", (2, 2), (2, 1))})), 1e6),
    "an attribute": Trick(held(with_state({"mask": LARGE})), 1e6),
    "an attribute of a list of a dict": Trick(held(with_state({"mask": [{"x": (LARGE,)}]})), 1e6),
    "an attribute of an attribute": Trick(held(with_state({"x": with_state({"x": LARGE})})), 1e6),
    "a grad": Trick(held(with_state({"grad": LARGE})), 1e6),
    "a __dict__": Trick(held(of_type({"__dict__": {"mask": LARGE}})), 1e6),
    "hooks": Trick(held(tensor(hooks=op({1: LARGE}))), 1e6),
    "hooks as a state": Trick(held(with_state({"_backward_hooks": {1: LARGE}})), 1e6),
    "the real part, written into a shared storage": Trick(
        checkpoint({"w": put(1, SMALL), "x": with_state({"real": LARGE}, get(1))}), 1e6
    ),
    "another class": Trick(held(with_state({"__class__": TENSOR, "data": LARGE})), 1e6),
    "a state of a parameter that holds nothing": Trick(held(with_state({})), 1.0),
    "a tensor that is set to another": Trick(held(build(SMALL, (LARGE,))), 1e6),
    "a tensor that is set to another storage": Trick(held(build(SMALL, (storage("1"), 0, (4,), (1,)))), 1e6),
    "a parameter that is set to another": Trick(
        held(build(new(PARAMETER, SMALL, False), (storage("1"), 0, (4,), (1,)))), 1e6
    ),
    "a dict with an attribute": Trick(checkpoint(build(filled(EMPTY, "w", SMALL), {"x": LARGE})), 1e6),
    "a counter with an attribute": Trick(checkpoint(build(call(COUNTER, {"w": SMALL}), {"x": LARGE})), 1e6),
    "a dict whose items are others": Trick(checkpoint(build(call(ORDERED), {"items": [LARGE]})), 1e6),
    "metadata of a dict": Trick(checkpoint(build(filled(EMPTY, "w", SMALL), {"_metadata": {"": {}}})), 1.0, usual=True),
}

PLACES = {
    "a tensor": Trick(checkpoint({"w": SMALL, "x": LARGE}), 1e6, usual=True),
    "a set": Trick(held(call(SET, [LARGE])), 1e6),
    "a set in a list": Trick(held([SMALL, call(SET, [LARGE])]), 1e6),
    "a key": Trick(checkpoint({"w": SMALL, LARGE: 1}), 1e6),
    "a key of a tuple": Trick(checkpoint({"w": SMALL, (1, LARGE): 1}), 1e6),
    "a key of a counter": Trick(held(call(COUNTER, [LARGE])), 1e6),
    "pairs": Trick(checkpoint(call(ORDERED, [("w", LARGE)])), 1e6),
    "a size": Trick(held((SMALL, call(SIZE, (1, 2)))), 1.0, usual=True),
    "a tensor from numbers": Trick(held(call(TENSOR, [1e6, 1.0])), 1e6),
    "a typed tensor from numbers": Trick(held(call(named("torch", "DoubleTensor"), [1e6, 1.0])), 1e6),
    "a tensor of what is in memory": Trick(held(call(TENSOR, 4)), ANY, refused=True),
    "a new tensor of what is in memory": Trick(held(new(TENSOR, 4)), ANY, refused=True),
    "a new parameter": Trick(held(new(PARAMETER, LARGE, False)), 1e6),
    "a parameter that is called": Trick(held(call(PARAMETER, LARGE, False)), 1e6),
    "a tensor of a type": Trick(held(of_type({}, key="1")), 1e6),
    "a set of a type": Trick(held(call(FROM_TYPE, SET, SET, ([LARGE],), None)), 1e6),
    "a copied dict": Trick(checkpoint([put(1, {"w": SMALL}), call(ORDERED, get(1)), filled(get(1), "x", LARGE)]), 1e6),
    "a key that is set again": Trick(checkpoint(filled(filled({}, "w", LARGE), "w", SMALL)), 1.0),
    "a name of bytes that is set again": Trick(checkpoint(filled(filled({}, b"U\1w", LARGE), "w", SMALL)), 1.0),
    "a storage": Trick(held(storage("1")), 1e6),
    "a storage in a list": Trick(held([SMALL, storage("1")]), 1e6),
    "an untyped storage": Trick(held(of_dtype(storage("1", 16, **UNTYPED), "float32")), 1e6, usual=True),
    "a tensor below the value": Trick(checkpoint(LARGE + op({"w": SMALL})), 1.0),
    "rows and columns": Trick(held(tensor("1", (2, 2), (1, 2))), 1e6, usual=True),
    "each element again and again": Trick(held(tensor("1", (3, 4), (0, 1))), 1e6),
    "2**40 elements": Trick(held(tensor("1", (2**40,), (0,))), 1e6),
    "lists in lists": Trick(held(twice(40)), 1.0),
    "a list in itself": Trick(held(b"]q\0h\0a"), 0.0),
    "a dict in itself": Trick(checkpoint(b"}q\0" + op("w") + LARGE + b"s" + op("x") + b"h\0s"), 1e6),
    "huge keys": Trick(checkpoint({2**2000 + n: SMALL for n in range(3)}), 1.0),
}

MILLIONS = numbers(*[10**6] * 4, dtype="<i8")
IN_BOTH_HALVES = numbers(1e6, 1.875, 1e6, 1.875)  # as float64: numbers near 1
SWAPPED = numbers(1e6, 1e6, 1e6, 1e6, dtype=">f4")
COMPLEX = numbers(1e6, 2 + 1j, dtype="<c8")
SWAPPED_COMPLEX = numbers(1e6, 2 + 1j, dtype=">c8")
HUGE = 2**2030
LONGS = {"kind": "LongStorage"}
INDICES = tensor("3", (1, 4), (4, 1), **LONGS)
ROWS, COLUMNS = tensor("4", (2,), elements=2, **LONGS), tensor("3", **LONGS)
SHAPES = [("5", (1, 1)), ("6", (1, 1)), ("7", (1,))]
NESTED = [tensor(key, shape, (1, 1)[: len(shape)], elements=1, **LONGS) for key, shape in SHAPES]
INTEGERS = {
    f"data__{key}": numbers(*x, dtype="<i8") for key, x in {3: range(4), 4: (0, 4), 5: [4], 6: [1], 7: [0]}.items()
}
QUANTIZED = storage("2", kind="QInt8Storage"), 0, (4,), (1,), (named("torch", "per_tensor_affine"), 1e6, 0)

STORED = {
    "one storage as two dtypes": Trick(
        held([tensor("2", (0,)), tensor("2", (2,), kind="DoubleStorage", elements=2)], data__2=IN_BOTH_HALVES), 1e6
    ),
    "one storage as two dtypes, with too many elements": Trick(
        held([tensor("2", (0,), kind="DoubleStorage", elements=2), tensor("2")], data__2=IN_BOTH_HALVES), RuntimeError
    ),
    "fewer elements than stored": Trick(held(tensor("1", (2,), elements=2)), RuntimeError, 1e6),
    "few elements, and then all": Trick(held([tensor("1", (0,), elements=1), LARGE]), RuntimeError),
    "more elements than stored": Trick(held(tensor("0", (8,), elements=8)), RuntimeError, ANY),
    "a view beyond its storage": Trick(held(tensor("0", (8,))), RuntimeError),
    "a view that starts beyond": Trick(held(tensor("0", (4,), first=1)), RuntimeError),
    "a view beyond a shared storage": Trick(held([SMALL, tensor("0", (2,), (7,))]), RuntimeError),
    "no elements beyond its storage": Trick(held(tensor("0", (0,), first=99)), 0.0),
    "a huge length": Trick(held(tensor("0", (HUGE,))), TypeError),
    "a huge distance": Trick(held(tensor("0", (4,), (HUGE,))), TypeError),
    "a huge number of elements": Trick(held(tensor("0", elements=HUGE)), TypeError, 1.0),
    "a negative length": Trick(held(tensor("0", (-1,))), RuntimeError),
    "a negative distance": Trick(held(tensor("0", (4,), (-1,), first=3)), RuntimeError),
    "a boolean as a length": Trick(held(tensor("0", (True,))), TypeError),
    "lengths without distances": Trick(held(tensor("0", (2, 2), (1,))), RuntimeError),
    "big-endian": Trick(held(tensor("2"), data__2=SWAPPED, byteorder=b"big"), 1e6),
    "big-endian without a dtype": Trick(held(of_dtype(storage("1", 16, **UNTYPED), "float32"), byteorder=b"big"), 1e6),
    "big-endian complex numbers": Trick(
        held(tensor("2", (2,), kind="ComplexFloatStorage", elements=2), data__2=SWAPPED_COMPLEX, byteorder=b"big"), 1e6
    ),
    "an unknown byte order": Trick(held(LARGE, byteorder=b"middle"), ValueError),
    "no byte order": Trick(held(LARGE, byteorder=None), 1e6, usual=True),
    "integers that become floats": Trick(
        held(call(TO_DTYPE, tensor("2", kind="LongStorage"), dtype("float32"), "cpu", False), data__2=MILLIONS), 1e6
    ),
    "floats that become infinite": Trick(held(call(TO_DTYPE, LARGE, dtype("float16"), "cpu", False)), np.inf),
    "floats that become integers": Trick(held(call(TO_DTYPE, LARGE, dtype("int64"), "cpu", False)), 0.0),
    "conjugated": Trick(
        held(tensor("2", (2,), metadata={"conj": True}, kind="ComplexFloatStorage", elements=2), data__2=COMPLEX), 1e6
    ),
    "negated": Trick(held(tensor("1", metadata={"neg": True})), 1e6),
    "metadata that say nothing": Trick(held(tensor("1", metadata={})), 1e6, usual=True),
    "a storage of another dtype": Trick(
        held(of_dtype(build(storage("2"), {"dtype": dtype("float64")}), "float32"), data__2=IN_BOTH_HALVES), 1e6
    ),
    "a storage that gets another dtype": Trick(
        held(tensor(build(storage("2", 2, "DoubleStorage"), {"dtype": dtype("float32")})), data__2=IN_BOTH_HALVES), 1e6
    ),
    "a storage that gets other bytes": Trick(
        held(tensor(build(storage("0"), {"_untyped_storage": storage("1")}))), 1e6
    ),
    "without values": Trick(
        held(call(named(UTILS, "_rebuild_meta_tensor_no_storage"), dtype("float32"), (4,), (1,), False)), TypeError
    ),
    "a storage of a GPU": Trick(held(tensor("1", place="cuda:0")), 1e6, usual=True),
    "a storage without values": Trick(held(tensor("1", place="meta")), 1e6),
    "a tensor that loses its values": Trick(held(call(TO_DTYPE, LARGE, dtype("float32"), "meta", False)), 1e6),
    "a sparse tensor": Trick(held(sparse("sparse_coo", INDICES, LARGE, (4,), True), **INTEGERS), 1e6),
    "a sparse tensor in rows": Trick(held(sparse("sparse_csr", ROWS, COLUMNS, LARGE, (1, 4)), **INTEGERS), 1e6),
    "a sparse tensor by its class": Trick(
        held(call(named("torch.sparse", "FloatTensor"), INDICES, LARGE, call(SIZE, (4,))), **INTEGERS), 1e6
    ),
    "a quantized tensor": Trick(
        held(call(named(UTILS, "_rebuild_qtensor"), *QUANTIZED, False, EMPTY), data__2=b"\1\1\1\1"), 1e6
    ),
    "a nested tensor": Trick(held(call(named(UTILS, "_rebuild_nested_tensor"), LARGE, *NESTED), **INTEGERS), 1e6),
    "a subclass without values": Trick(
        held(call(SUBCLASS, TENSOR, dtype("float32"), (4,), (1,), 0, layout("strided"), "cpu", False)), TypeError
    ),
    "a buffer": Trick(held(of_type({"data": LARGE}, named("torch.nn.parameter", "Buffer"))), UnpicklingError),
    "code": Trick(held(call(named("os", "system"), "true")), UnpicklingError),
    "a later protocol": Trick(held(b"\x8c\1x"), UnpicklingError),
}

PICKLED = STATES | PLACES | STORED
