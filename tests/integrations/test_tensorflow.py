"""TensorFlow's names on gradclip's engine, beside TensorFlow itself."""

import math

import numpy as np
import pytest
import tensorflow as tf

from gradclip._src.tree import flatten
from gradclip.integrations import tensorflow as ours
from rational import at_most

MODES = ("eager", "function", "xla")


def called(function, mode, *args):
    return (function if mode == "eager" else tf.function(function, jit_compile=mode == "xla"))(*args)


def tensors(*shapes, dtype=np.float32):
    rng = np.random.default_rng(len(shapes))
    return [tf.constant(rng.normal(size=shape).astype(dtype)) for shape in shapes]


def near(found, expected):
    for x, y in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("threshold", [0.5, 100.0, math.inf])
def test_global_norms(mode, threshold):
    given = tensors((3, 2), (4,), ())
    # Of an infinite threshold TensorFlow makes NaN: inf * min(1 / norm, 1 / inf).
    expected = given if threshold == math.inf else tf.clip_by_global_norm(given, threshold)[0]
    found, norm = called(lambda *given: ours.clip_by_global_norm(given, threshold), mode, *given)
    near(found, expected)
    near(norm, tf.linalg.global_norm(given))
    near(called(lambda *given: ours.global_norm(given), mode, *given), norm)


def same(found, expected):
    for x, y in zip(flatten(found).leaves, flatten(expected).leaves, strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_what_tensorflow_makes_a_tensor_of_is_one(mode):
    row, array = [3.0, 4.0], np.array([3.0, 4.0], np.float32)
    for function in (
        lambda f: f.clip_by_norm(row, 1.0),
        lambda f: f.clip_by_norm(row, 1.0, axes=0),
        lambda f: f.clip_by_norm(array, 1.0, axes=tf.constant([0])),
        lambda f: f.clip_by_value(row, -3.5, 3.5),
        lambda f: f.clip_by_value(tf.constant([3, 4]), -3, 3),
        lambda f: f.clip_by_global_norm([row, array, tf.constant(row)], 1.0),
        lambda f: f.clip_by_global_norm([array, None, tf.Variable(row) if mode == "eager" else row], tf.constant(1.0)),
    ):
        same(called(lambda function=function: function(ours), mode), function(tf))


@pytest.mark.parametrize("mode", MODES)
def test_no_tensors_have_the_norm_0(mode):
    for given in ([], [None]):
        found, norm = called(lambda c, given=given: ours.clip_by_global_norm(given, c), mode, tf.constant(1.0))
        assert list(found) == given
        assert norm.dtype == tf.float32
        assert float(norm) == float(ours.global_norm(given)) == 0.0
    assert isinstance(ours.global_norm([]), tf.Tensor)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use_norm", [0.1, 3.0, 100.0])
def test_a_norm_that_is_known(mode, use_norm):
    given = tensors((3, 2), (4,))
    found, norm = called(lambda *given: ours.clip_by_global_norm(given, 1.0, use_norm=use_norm), mode, *given)
    near(found, tf.clip_by_global_norm(given, 1.0, use_norm=tf.constant(use_norm))[0])
    assert float(norm) == pytest.approx(use_norm)


def test_a_known_norm_keeps_the_bound_as_far_as_it_is_right():
    given = tensors((100,))
    norm = ours.global_norm(given)
    for threshold in (0.1, 0.7, 3.0):
        (found,), _ = ours.clip_by_global_norm(given, threshold, use_norm=norm)
        assert at_most([np.asarray(found)], 2, threshold)
    (spoiled,), _ = ours.clip_by_global_norm(given, 1.0, use_norm=math.inf)
    assert np.isnan(spoiled).all()


def test_tapes_see_through_a_known_norm():
    x = tf.constant([3.0, 4.0])

    def gradient(call):
        with tf.GradientTape() as tape:
            tape.watch(x)
            norm = tf.norm(x)
            value = tf.reduce_sum(call([x], 1.0, use_norm=norm)[0][0] * tf.constant([1.0, 2.0]))
        return tape.gradient(value, x)

    near(gradient(ours.clip_by_global_norm), gradient(tf.clip_by_global_norm))


def test_none_stays_none():
    found, norm = ours.clip_by_global_norm([None, tf.constant([3.0, 4.0]), None], 1.0)
    assert found[0] is None
    assert found[2] is None
    assert float(norm) == 5.0


@pytest.mark.parametrize("mode", MODES)
def test_rows_at_one_index_count_as_their_sum(mode):
    def norms(values):
        slices = tf.IndexedSlices(values, tf.constant([1, 1]), tf.constant([3, 1]))
        (found,), norm = ours.clip_by_global_norm([slices], 3.5)
        return tf.convert_to_tensor(found), norm, tf.linalg.global_norm([slices])

    dense, norm, theirs = called(norms, mode, tf.constant([[3.0], [4.0]]))
    # The gradient is 7. TensorFlow takes the root of 3**2 + 4**2.
    assert (float(norm), float(theirs)) == (7.0, 5.0)
    near(dense, tf.constant([[0.0], [3.5], [0.0]]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axes", [None, 0, [1], (0, 1), -1])
def test_norms_along_axes(mode, axes):
    (given,) = tensors((3, 4))
    found = called(lambda t: ours.clip_by_norm(t, 0.8, axes=axes), mode, given)
    near(found, tf.clip_by_norm(given, 0.8, axes=axes))


def test_slices_are_clipped_by_their_norm():
    slices = tf.IndexedSlices(tf.constant([[3.0], [4.0]]), tf.constant([0, 2]), tf.constant([3, 1]))
    found = ours.clip_by_norm(slices, 1.0)
    assert isinstance(found, tf.IndexedSlices)
    near(found.values, tf.constant([[0.6], [0.8]]))
    near(ours.clip_by_norm(slices, 1.0, axes=1).values, tf.constant([[1.0], [1.0]]))


@pytest.mark.parametrize("bounds", [(-0.5, 0.5), (-0.5, 1.0), (0.2, 0.3)])
def test_values(bounds):
    (given,) = tensors((20,))
    np.testing.assert_array_equal(ours.clip_by_value(given, *bounds), tf.clip_by_value(given, *bounds))


def test_values_of_low_precision_keep_their_bound():
    given = tf.constant([-5.0, 5.0], tf.float16)
    assert np.abs(np.asarray(ours.clip_by_value(given, -0.7, 0.7)).astype(np.float64)).max() <= 0.7
    assert np.abs(np.asarray(tf.clip_by_value(given, -0.7, 0.7)).astype(np.float64)).max() > 0.7


@pytest.mark.parametrize("threshold", [0.01, 0.5, math.inf])
def test_average_norms(threshold):
    (given,) = tensors((20,))
    expected = given if threshold == math.inf else tf.compat.v1.clip_by_average_norm(given, threshold)
    near(ours.clip_by_average_norm(given, threshold), expected)
    if threshold != math.inf:
        near(ours.clip_by_average_norm(given, tf.constant(threshold)), expected)


def test_what_cannot_be_clipped_is_refused():
    with pytest.raises(TypeError, match=r"t_list must be a list or a tuple .* gradclip.clip_by_global_norm"):
        ours.clip_by_global_norm(tf.constant([1.0]), 1.0)
    with pytest.raises(ValueError, match=r"^clip_norm must not be negative"):
        ours.clip_by_global_norm([tf.constant([1.0])], -1.0)
    with pytest.raises(ValueError, match=r"use_norm must be non-negative .* as grad_norm or global_norm returns it"):
        ours.clip_by_global_norm([tf.constant([1.0])], 1.0, use_norm=-1.0)
    with pytest.raises(ValueError, match=r"^axes is 3, but t of shape \(2, 2\) has no such axis"):
        ours.clip_by_norm(tf.ones([2, 2]), 1.0, axes=3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_makes_all_nan_as_in_tensorflow(value):
    given = [tf.constant([1.0, value]), tf.constant([2.0])]
    for found, known in zip(
        ours.clip_by_global_norm(given, 1.0)[0], tf.clip_by_global_norm(given, 1.0)[0], strict=True
    ):
        assert np.isnan(found).all()
        assert np.isnan(known).all()


def test_integers_are_refused_as_by_tensorflow():
    whole = tf.constant([3, 4])
    for names in (ours, tf):
        calls = [
            lambda names=names: names.clip_by_global_norm([tf.ones(2), whole], 1.0),
            lambda names=names: names.clip_by_norm(whole, 1.0),
        ]
        for call in calls:
            with pytest.raises((TypeError, tf.errors.InvalidArgumentError), match=r"has dtype int32|'T' of int32"):
                call()
    for call in (lambda: ours.global_norm([whole]), lambda: ours.clip_by_average_norm(whole, 1.0)):
        with pytest.raises(TypeError, match="has dtype int32"):
            call()
    assert ours.clip_by_value(whole, -1, 1).dtype == tf.int32
