"""Two factors of one element: TensorFlow must not multiply them with each other first."""

import numpy as np
import pytest
import tensorflow as tf

import gradclip


def recorded(function, rows):
    """Return what a function makes of rows in a graph, with any threshold and any number of rows."""
    graph = tf.function(function, input_signature=[tf.TensorSpec([None, rows.shape[1]], rows.dtype)])
    return graph(tf.constant(rows)).numpy()


@pytest.mark.parametrize("max_norm", [2.5, 7e4, 1e290])
@pytest.mark.parametrize("rule", ["normalize", "automatic"])
def test_an_example_of_zeros_leaves_the_sum_as_it_is(max_norm, rule):
    rows = np.array([[0.0, 0.0, 0.0], [0.0, 3.0, -4.0], [0.0, 0.0, 0.0], [6.0, 0.0, 8.0]])
    call = lambda x: gradclip.per_example_clip(x, max_norm, rule=rule, gamma=1e-12)[0]
    np.testing.assert_allclose(recorded(call, rows), np.array([0.6, 0.6, 0.0]) * max_norm, atol=1e-9 * max_norm)


def test_a_gradient_of_zeros_of_a_loss():
    clipped = gradclip.clipped_grad(lambda w, x: tf.reduce_sum(w * x), 3e5, rule="normalize")
    rows = tf.constant([[0.0, 0.0], [3.0, 4.0]], tf.float64)
    np.testing.assert_allclose(clipped(tf.ones(2, tf.float64), rows), [1.8e5, 2.4e5], rtol=1e-9)


@pytest.mark.parametrize("tiny", [3e-308, 5e-300])
def test_an_example_near_the_end_of_the_range_is_made_as_long_as_the_others(tiny):
    call = lambda x: gradclip.per_example_clip(x, 1e5, rule="normalize")[0]
    found = recorded(call, np.array([[tiny, 0.0], [0.0, 2.0]]))
    assert 0.0 < found[0] <= 1e5
    np.testing.assert_allclose(found[1], 1e5, rtol=1e-9)


@pytest.mark.parametrize(("dtype", "large", "max_norm"), [("float32", 2e30, 1e-10), ("float64", 1e300, 1e-15)])
def test_coefficients_below_the_normal_range(dtype, large, max_norm):
    rows = np.full((4, 3), large, dtype)  # units of four
    units = recorded(lambda x: gradclip.clip_by_unit_norm(x, max_norm)[0], rows)
    np.testing.assert_allclose(units, np.full((4, 3), max_norm / 2), rtol=1e-6)
    summed = recorded(lambda x: gradclip.per_example_clip(x, max_norm)[0], rows)
    np.testing.assert_allclose(summed, np.full(3, 4 / 3**0.5 * max_norm), rtol=1e-6)
