"""Tensors that turn out to be empty when a graph runs, because a length is unknown while it is recorded."""

import math
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import gradclip

ORDERS = [1, 2, 3, math.inf, -math.inf]
UNKNOWN = tf.TensorSpec([None, 2], tf.float32)
SHAPES = [(0, 2), (2, 2)]
FILLED = np.array([[3.0, -4.0], [0.5, 6.0]], np.float32)


def clipped(empty, other, ord, max_norm=1.0):
    with tf.GradientTape() as tape:
        tape.watch([empty, other])
        result, norm = gradclip.clip_by_global_norm([empty, other], max_norm, ord=ord)
        changed = sum(tf.reduce_sum(leaf * leaf) for leaf in result) + norm
    return result, norm, tape.gradient(changed, [empty, other])


@pytest.mark.parametrize("xla", [False, True])
@pytest.mark.parametrize("ord", ORDERS)
def test_an_empty_leaf_changes_nothing(ord, xla):
    run = tf.function(partial(clipped, ord=ord), input_signature=[UNKNOWN, UNKNOWN], jit_compile=xla)
    (empty, found), norm, (of_empty, slope) = run(tf.zeros([0, 2]), FILLED)
    (alone, expected), _, (_, expected_slope) = clipped(tf.zeros([0, 2]), tf.constant(FILLED), ord)
    assert empty.shape == of_empty.shape == alone.shape == (0, 2)
    np.testing.assert_allclose(norm, np.linalg.norm(FILLED.ravel(), ord), rtol=1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ord", ORDERS)
def test_without_any_element_the_norm_is_zero(ord):
    nothing = tf.zeros([0, 2])
    run = tf.function(partial(clipped, ord=ord, max_norm=0.0), input_signature=[UNKNOWN, UNKNOWN])
    assert float(run(nothing, nothing)[1]) == 0.0
    norms = tf.function(lambda x: gradclip.layer_norms([x, x], ord), input_signature=[UNKNOWN])(nothing)
    assert list(map(float, norms)) == [0.0, 0.0]


@pytest.mark.parametrize("ord", ORDERS)
def test_units_and_examples_without_elements(ord):
    wide = tf.TensorSpec([2, None], tf.float32)
    nothing = tf.zeros([2, 0])
    units = tf.function(lambda x: gradclip.clip_by_unit_norm(x, 1.0, unit_axis=0, ord=ord), input_signature=[wide])
    result, norms = units(nothing)
    assert result.shape == (2, 0)
    assert norms.numpy().tolist() == [0.0, 0.0]
    beside = tf.function(
        lambda x: gradclip.per_example_clip([x, tf.constant(FILLED)], 1.0, per_layer=False), input_signature=[wide]
    )
    (summed, other), _ = beside(nothing)
    (_, expected), _ = gradclip.per_example_clip([nothing, tf.constant(FILLED)], 1.0)
    assert summed.shape == (0,)
    np.testing.assert_allclose(other, expected, rtol=1e-5)
