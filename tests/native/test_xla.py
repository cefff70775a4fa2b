"""The kernels called as XLA calls them, by its binary interface."""

import ctypes
import math

import numpy as np
import pytest

from gradclip.native import describe_buffers, kernels

DATA_TYPES = {"int32": 4, "float16": 10, "float32": 11, "float64": 12, "complex64": 15, "complex128": 18}
EXECUTE, INVALID_ARGUMENT = 3, 3
Pointer, Size, Integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
HEAD = [("size", Size), ("extensions", Pointer)]


def structure(name, fields):
    return type(name, (ctypes.Structure,), {"_fields_": fields})


Version = structure("Version", [*HEAD, ("major", Integer), ("minor", Integer)])
Metadata = structure("Metadata", [("size", Size), ("version", Version), ("traits", ctypes.c_uint32)])
Extension = structure(
    "Extension", [("size", Size), ("type", Integer), ("next", Pointer), ("metadata", ctypes.POINTER(Metadata))]
)
ErrorRequest = structure("ErrorRequest", [*HEAD, ("message", ctypes.c_char_p), ("code", Integer)])
CreateError = ctypes.CFUNCTYPE(Pointer, ctypes.POINTER(ErrorRequest))
Api = structure("Api", [*HEAD, ("version", Version), ("internal", Pointer), ("create_error", CreateError)])
Buffer = structure(
    "Buffer",
    [*HEAD, ("dtype", Integer), ("data", Pointer), ("rank", ctypes.c_int64), ("dims", ctypes.POINTER(ctypes.c_int64))],
)
Buffers = structure("Buffers", [*HEAD, ("count", ctypes.c_int64), ("types", Pointer), ("buffers", Pointer)])
Text = structure("Text", [("start", ctypes.c_char_p), ("length", Size)])
Scalar = structure("Scalar", [("dtype", Integer), ("value", Pointer)])
Attributes = structure(
    "Attributes", [*HEAD, ("count", ctypes.c_int64), ("types", Pointer), ("names", Pointer), ("values", Pointer)]
)
Call = structure(
    "Call",
    [
        *HEAD,
        ("api", ctypes.POINTER(Api)),
        ("context", Pointer),
        ("stage", Integer),
        ("arguments", Buffers),
        ("results", Buffers),
        ("attributes", Attributes),
        ("future", Pointer),
    ],
)


class Caller:
    """One call; keeps alive what it points to."""

    def __init__(self):
        self.kept = []
        self.errors = []

    def keep(self, thing):
        self.kept.append(thing)
        return thing

    def pointers(self, things):
        addresses = [ctypes.addressof(self.keep(thing)) for thing in things]
        return ctypes.addressof(self.keep((Pointer * max(1, len(things)))(*addresses)))

    def buffers(self, arrays):
        described = []
        for array in arrays:
            dims = self.keep((ctypes.c_int64 * max(1, array.ndim))(*array.shape))
            dtype = DATA_TYPES[array.dtype.name]
            described.append(Buffer(dtype=dtype, data=array.ctypes.data, rank=array.ndim, dims=dims))
        return Buffers(count=len(arrays), buffers=self.pointers(described))

    def attributes(self, named):
        values = []
        for value in named.values():
            of_type = ctypes.c_int64 if isinstance(value, int) else ctypes.c_double
            held = self.keep(of_type(value))
            values.append(Scalar(dtype=5 if isinstance(value, int) else 12, value=ctypes.addressof(held)))
        names = [Text(start=name.encode(), length=len(name)) for name in named]
        types = self.keep((Integer * len(named))(*[3] * len(named)))
        return Attributes(
            count=len(named),
            types=ctypes.addressof(types),
            names=self.pointers(names),
            values=self.pointers(values),
        )

    def created(self, request):
        self.errors.append((request.contents.code, request.contents.message.decode()))
        return 1

    def call(self, capsule, arrays, results, **attributes):
        api = self.keep(Api(create_error=self.keep(CreateError(self.created))))
        call = Call(
            api=ctypes.pointer(api),
            stage=EXECUTE,
            arguments=self.buffers(arrays),
            results=self.buffers(results),
            attributes=self.attributes(attributes),
        )
        return function_of(capsule)(ctypes.byref(call))


def function_of(capsule):
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = Pointer, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.CFUNCTYPE(Pointer, ctypes.POINTER(Call))(pointer(capsule, b"xla._CUSTOM_CALL_TARGET"))


def two_results(rows, capsule, arrays, **attributes):
    results = np.full(rows, -1.0), np.full(rows, -1.0)
    caller = Caller()
    assert caller.call(capsule, arrays, results, threads=2, **attributes) is None
    assert caller.errors == []
    return results


def power_sums(arrays, p=2.0, enough=-1.0, rows=()):
    return two_results(rows, kernels.xla_power_sums(), arrays, p=p, enough=enough)


def extremes(arrays, rows=()):
    return two_results(rows, kernels.xla_extremes(), arrays)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_the_bits_of_a_call_from_python(dtype):
    arrays = [(np.arange(1, n + 1) % 100).astype(dtype) for n in (0, 3, 70000)]
    known, _ = describe_buffers(arrays)
    assert power_sums(arrays, 3.0)[0] == known.sum(3.0, 1.0, False, 1)[0]
    assert (*map(float, extremes(arrays)),) == known.extremes(1)[:2]


def test_registration_learns_the_version():
    metadata = Metadata()
    extension = Extension(type=1, metadata=ctypes.pointer(metadata))
    call = Call(extensions=ctypes.addressof(extension))
    assert function_of(kernels.xla_extremes())(ctypes.byref(call)) is None
    assert (metadata.version.major, metadata.version.minor, metadata.traits) == (0, 2, 0)


def test_rows_are_leading_axes_and_length_one_stands_for_equal_rows():
    a = np.arange(12.0).reshape(2, 3, 2)
    b = np.array([[[1.0], [2.0], [3.0]]])
    c = np.array([[[5.0]], [[7.0]]])
    expected = (a**2).sum(-1) + (b**2).sum(-1) + (c**2).sum(-1)
    np.testing.assert_array_equal(power_sums([a, b, c], rows=(2, 3))[0], expected)
    largest, smallest = extremes([a, b, c], rows=(2, 3))
    np.testing.assert_array_equal(largest, np.maximum(a.max(-1), np.maximum(b, c).max(-1)))
    np.testing.assert_array_equal(smallest, np.minimum(a.min(-1), np.minimum(b, c).min(-1)))


def test_no_rows_and_no_arrays():
    assert power_sums([np.ones((0, 3))], rows=(0,))[0].shape == (0,)
    assert power_sums([])[0] == 0.0


def test_each_row_has_the_divisor_that_it_needs():
    x = np.array([[3e200, 4e200], [3.0, 4.0], [3e-200, 4e-200], [0.0, 0.0], [math.inf, 1.0], [5e-324, 0.0]])
    total, divisor = power_sums([x], enough=2.0**-900, rows=(6,))
    tiny = np.finfo(np.float64).tiny
    np.testing.assert_array_equal(divisor, [4e200, 1.0, 4e-200, 1.0, 1.0, tiny])
    np.testing.assert_allclose(total, [1.5625, 25.0, 1.5625, 0.0, math.inf, 2.0**-104], rtol=1e-15)
    total, divisor = power_sums([x[1:2]], enough=math.inf, rows=(1,))
    assert (total[0], divisor[0]) == (1.5625, 4.0)


@pytest.mark.parametrize(
    ("arrays", "results", "attributes", "message"),
    [
        ([np.ones(3)], 2, {"p": 2.0, "threads": 1}, "attribute enough is missing"),
        ([np.ones(3)], 2, {"p": 2, "enough": 0.0, "threads": 1}, "attribute p is missing"),
        ([np.ones(3, np.int32)], 2, {"p": 2.0, "enough": 0.0, "threads": 1}, "XLA's type 4"),
        ([np.ones(3)], 1, {"p": 2.0, "enough": 0.0, "threads": 1}, "two results"),
    ],
)
def test_a_wrong_call_is_an_error_and_no_exception(arrays, results, attributes, message):
    caller = Caller()
    assert caller.call(kernels.xla_power_sums(), arrays, [np.zeros(()) for _ in range(results)], **attributes) == 1
    ((code, said),) = caller.errors
    assert code == INVALID_ARGUMENT
    assert message in said


def test_rows_that_do_not_match_are_an_error():
    caller = Caller()
    wide = [np.zeros(4), np.zeros(4)]
    assert caller.call(kernels.xla_extremes(), [np.ones((3, 2))], wide, threads=1) == 1
    assert "leading axes" in caller.errors[0][1]
