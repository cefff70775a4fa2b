"""The kernels called as XLA calls them, by its binary interface."""

import ctypes
import math

import numpy as np
import pytest

from gradclip._src.native import describe_buffers, kernels
from xla_calls import INVALID_ARGUMENT, Call, Caller, Extension, Metadata, function_of


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
