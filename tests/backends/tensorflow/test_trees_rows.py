import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import gradclip
from gradclip._src.backends.tensorflow.trees import merged, pieces

pytestmark = pytest.mark.xdist_group("tensorflow")
HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("dtype", HALVES)
def test_other_rows_are_rounded_toward_zero(dtype):
    rng = np.random.default_rng(len(dtype))
    exact = (rng.normal(size=400) * np.exp2(rng.integers(-30, 13, 400))).astype(np.float32)
    array = tf.IndexedSlices(tf.zeros([400], dtype), tf.zeros([400], tf.int32))
    for compile in (lambda f: f, tf.function, lambda f: tf.function(f, jit_compile=True)):
        found = compile(lambda x: pieces(array, tf.zeros_like(x), x))(tf.constant(exact)).numpy()
        wide = np.abs(found.astype(np.float64))
        assert (wide <= np.abs(exact)).all()
        next_up = np.abs(np.nextafter(np.abs(found), HALVES[dtype](np.inf)).astype(np.float64))
        assert (next_up > np.abs(exact)).all()


def test_derivatives_pass_through_pieces_that_stay_and_that_are_scaled_in_half_precision():
    values, indices = tf.constant([[1.0], [2.0], [4.0]], tf.bfloat16), tf.constant([1, 1, 0])
    for c, slope in ((100.0, [1.0, 5.0, 2.0]), (2.5, None)):
        with tf.GradientTape() as tape:
            tape.watch(values)
            clipped = gradclip.clip_by_global_norm(tf.IndexedSlices(values, indices), c)[0].values
            result = tf.reduce_sum(clipped * tf.constant([[1.0], [5.0], [2.0]], tf.bfloat16))
        found = tf.convert_to_tensor(tape.gradient(result, values)).numpy().astype(float).ravel()
        # Clipped to half of the norm 5: the derivative of (s + 2 z) / 2 along (3, 4) / 5 is zero.
        expected = slope or [0.5 - 0.5 * 11 / 5 * 0.6] * 2 + [1.0 - 0.5 * 11 / 5 * 0.8]
        np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.01)


def test_rows_without_duplicates_are_the_values_themselves():
    values = tf.constant([1.0, 2.0])
    assert merged(values, tf.constant([4, 0])) is values
