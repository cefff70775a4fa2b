"""Sums of squares of large tensors in graphs, beside exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf

import gradclip
from gradclip._src.backends.tensorflow.graph import (
    ERROR_AT_A_TIME,
    LARGE,
    Graph,
    compiled_by_xla,
    in_pieces,
    is_large,
    some_at_a_time,
)
from gradclip._src.core.formats import FLOAT32
from rational import at_most, power_of_norm

MODES = ("function", "xla")


def recorded(function, mode):
    return tf.function(function, jit_compile=mode == "xla")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [LARGE, LARGE + 15, (1 << 19) + 1])
def test_sums_are_within_their_error(mode, size):
    x = np.random.default_rng(size).normal(size=size).astype(np.float32)
    exact = math.fsum(np.square(x.astype(np.float64)).tolist())
    both = recorded(lambda t: (some_at_a_time(t), in_pieces(t)), mode)
    rough, fine = (float(found) for found in both(tf.constant(x)))
    assert abs(rough / exact - 1) <= ERROR_AT_A_TIME
    assert abs(fine / exact - 1) <= size * 2.0**-53
    assert rough != fine


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-22, 1e-12, 1.0, 1e18, 1e20, 3e36])
def test_norms_are_right_at_every_magnitude(mode, scale):
    x = (np.random.default_rng(1).uniform(0.5, 1.0, LARGE + 7) * scale).astype(np.float32)
    norm = recorded(lambda t: gradclip.global_norm(tf.cast(t, tf.float32)), mode)(tf.constant(x))
    kept = np.where(np.abs(x) < FLOAT32.tiny, 0.0, x.astype(np.float64))  # TensorFlow reads the others as zeros
    np.testing.assert_allclose(float(norm), np.linalg.norm(kept), rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_the_bound_of_large_tensors_is_exact_and_tight(mode, dtype):
    rng = np.random.default_rng(2)
    values = rng.normal(size=LARGE) + (1j * rng.normal(size=LARGE) if dtype == "complex64" else 0.0)
    x = tf.cast(tf.constant(values), dtype)
    norm = math.sqrt(power_of_norm([np.asarray(x)], 2))
    clip = recorded(lambda t, c: gradclip.clip_by_global_norm(t, c), mode)
    for threshold in (norm * (1 - 3e-7), norm * (1 - 1e-9), norm * (1 + 1e-9), norm / 3, 1e-3):
        result, _ = clip(x, tf.constant(threshold, tf.float64))
        assert at_most([np.asarray(result)], 2, threshold)
        if threshold > 1:
            tight = Fraction(0.99 if dtype in ("float16", "bfloat16") else 1 - 1e-5) * Fraction(threshold)
            assert power_of_norm([np.asarray(result)], 2) >= tight**2
    result, _ = clip(x, tf.constant(norm * (1 + 1e-5), tf.float64))
    assert np.array_equal(np.asarray(result), np.asarray(x))


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_is_seen(mode):
    norm = recorded(lambda t: gradclip.global_norm(t), mode)
    for value in (math.nan, math.inf):
        x = np.ones(LARGE, np.float32)
        x[1234] = value
        assert not np.isfinite(float(norm(tf.constant(x))))


def test_tensors_beside_float64():
    x, y = tf.ones([LARGE]), tf.constant([1e200, 1.0], tf.float64)
    norm = tf.function(lambda *t: gradclip.global_norm(t))
    assert float(norm(x, y)) == pytest.approx(1e200)
    assert float(norm(x, 1e-200 * y)) == pytest.approx(math.sqrt(LARGE + 1))


def test_who_adds_some_at_a_time():
    assert is_large(tf.ones([LARGE]))
    assert not is_large(tf.ones([LARGE - 1]))
    found = []
    tf.function(lambda x: found.append(is_large(x)) or x, input_signature=[tf.TensorSpec([None])])(tf.ones([LARGE]))
    assert found == [False]
    assert not compiled_by_xla()
    # With tensors on a device, eagerly, the choice would wait for it.
    assert Graph(visible=True).with_care(lambda backend: backend.some_at_a_time, [tf.ones([LARGE])], LARGE) is None
