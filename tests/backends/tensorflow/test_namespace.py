"""Beside NumPy's operations of the same names, eagerly and compiled by XLA."""

import array_api_compat.numpy as xp
import numpy as np
import pytest
import tensorflow as tf

from gradclip._src.backends.tensorflow import namespace

MODES = ("eager", "function", "xla")
X = np.array([[3.0, -4.5, 0.0], [1e300, -1e-300, 2.0]])
FLAGS = np.array([[True, False, True], [False, False, True]])
CALLS = {
    "hypot": lambda xp, x: xp.hypot(x, x * 2),
    "trunc": lambda xp, x: xp.trunc(x),
    "round": lambda xp, x: xp.round(x),
    "clip": lambda xp, x: xp.clip(x, -1.0, 1.0),
    "max": lambda xp, x: xp.max(x, axis=1),
    "max of all": lambda xp, x: xp.max(x),
    "min": lambda xp, x: xp.min(x, axis=(0,)),
    "sum": lambda xp, x: xp.sum(x, axis=(0, 1)),
    "sum of none": lambda xp, x: xp.sum(x, axis=()),
    "stack": lambda xp, x: xp.stack([x, x], axis=0),
    "concat": lambda xp, x: xp.concat([x, x]),
    "reshape": lambda xp, x: xp.reshape(x, (3, 2)),
    "permute_dims": lambda xp, x: xp.permute_dims(x, (1, 0)),
    "broadcast_to": lambda xp, x: xp.broadcast_to(x, (4, 2, 3)),
    "full_like": lambda xp, x: xp.full_like(x, 2.5),
    "sort": lambda xp, x: xp.sort(x, axis=-1),
    "where with numbers": lambda xp, x: xp.where(x > 0, x, -1.0),
    "where of a number": lambda xp, x: xp.where(x > 0, 1.0, x),
    "maximum": lambda xp, x: xp.maximum(x, xp.zeros_like(x)),
    "minimum": lambda xp, x: xp.minimum(x, xp.ones_like(x)),
    "astype": lambda xp, x: xp.astype(x > 0, xp.int64),
    "abs": lambda xp, x: xp.abs(x),
    "isfinite": lambda xp, x: xp.isfinite(x),
    "any": lambda xp, x: xp.any(x > 100),
    "all": lambda xp, x: xp.all(x > 100),
}


def called(function, mode, *args):
    if mode != "eager":
        function = tf.function(function, jit_compile=mode == "xla")
    return np.asarray(function(*args))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("mode", MODES)
def test_operations(name, mode):
    found = called(lambda x: CALLS[name](namespace, x), mode, tf.constant(X))
    expected = CALLS[name](xp, X)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    # XLA's code for the CPU reads what is below the normal range as zero, which none of these is.
    np.testing.assert_allclose(found, expected, rtol=1e-15)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["max", "min"])
def test_extremes_pass_nan_on(mode, name):
    for place in range(4):
        x = np.arange(4.0)
        x[place] = np.nan
        assert np.isnan(called(lambda t: getattr(namespace, name)(t), mode, tf.constant(x)))


@pytest.mark.parametrize("mode", MODES)
def test_hypot_of_what_is_not_finite(mode):
    x, y = (tf.constant([np.inf, other, 0.0, 1e308], tf.float64) for other in (1.0, np.inf))
    np.testing.assert_array_equal(called(namespace.hypot, mode, x, y)[:3], [np.inf, np.inf, 0.0])
    assert np.isnan(called(namespace.hypot, mode, tf.constant([np.nan]), tf.constant([1.0])))[0]


@pytest.mark.parametrize("mode", MODES)
def test_frexp(mode):
    x = np.array([1.0, 0.75, -3.0, 2.0**1023, 2.0**-1022, 0.1])
    fraction, exponent = np.frexp(x)
    np.testing.assert_array_equal(called(lambda t: namespace.frexp(t)[0], mode, tf.constant(x)), fraction)
    np.testing.assert_array_equal(called(lambda t: namespace.frexp(t)[1], mode, tf.constant(x)), exponent)


def test_sums_of_truth_values_count_them():
    assert int(namespace.sum(tf.constant(FLAGS))) == 3
    assert namespace.sum(tf.constant(FLAGS), dtype=tf.int64).dtype == tf.int64


def test_take_along_the_last_axis():
    x, k = X[:, :2], np.array([[1], [0]])
    np.testing.assert_array_equal(
        namespace.take_along_axis(tf.constant(x), tf.constant(k), axis=-1), np.take_along_axis(x, k, -1)
    )
    with pytest.raises(NotImplementedError):
        namespace.take_along_axis(tf.constant(x), tf.constant(k), axis=0)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("float32", "float32"), "float32"),
        (("float16", "float32"), "float32"),
        (("float16", "float16"), "float16"),
        (("bfloat16", "float64"), "float64"),
        (("complex64", "float32"), "complex64"),
        (("complex64", "float64"), "complex128"),
    ],
)
def test_result_type(dtypes, expected):
    assert namespace.result_type(*map(tf.as_dtype, dtypes)).name == expected
    assert namespace.result_type(*(tf.ones([], dtype) for dtype in dtypes)).name == expected


def test_asarray():
    assert namespace.asarray(1.5, tf.float64).dtype == tf.float64
    assert namespace.asarray(tf.constant(1.5), tf.float64).dtype == tf.float64
    assert namespace.asarray(np.float32(2.0)).dtype == tf.float32
    assert float(namespace.asarray(tf.Variable(3.0))) == 3.0


def test_kinds_of_dtypes():
    assert namespace.isdtype(tf.complex64, "complex floating")
    assert not namespace.isdtype(tf.float32, "complex floating")
    with pytest.raises(NotImplementedError):
        namespace.isdtype(tf.float32, "integral")
    assert namespace.finfo(tf.float32).eps == 2.0**-23
