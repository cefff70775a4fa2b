"""Thresholds so small that a coefficient needs two factors, in compiled code. Compilers multiply in another order.

Norms range from far below 1 to far above it, so that the product of some of the factors alone could leave the range.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

import gradclip

NORMS = np.exp2(np.arange(-330.0, 420.0, 7.5))
NORMS[9] = 0.0
ROWS = NORMS[:, None] * np.array([0.75, -0.75])  # so that any norm of a row bounds both
THRESHOLDS = [0.0, 5e-324, 2.0**-1065, 2.0**-1010, 2.0**-700]


def units(rows, c, ord=2):
    return gradclip.clip_by_unit_norm(rows, c, unit_axis=0, ord=ord)[0]


def adaptive(rows, c):
    return gradclip.adaptive_grad_clip(rows, rows * 0.0, clipping=1.0, eps=c, unit_axis=0)[0]


def examples(rows, c):
    return gradclip.per_example_clip(rows, c)[0] / len(NORMS)


FUNCTIONS = [units, partial(units, ord=-math.inf), partial(units, ord=3), adaptive, examples]


def assert_within(clipped, c):
    """A NaN is not within any threshold."""
    assert (np.abs(np.asarray(clipped)) <= c).all()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("xla", [False, True])
def test_rows_in_a_tensorflow_graph(function, xla):
    rows = tf.constant(ROWS)
    traced = tf.function(function, jit_compile=xla)
    for c in THRESHOLDS:
        assert_within(traced(rows, tf.constant(c, tf.float64)), c)
    assert_within(tf.function(lambda rows: function(rows, 0.0), jit_compile=xla)(rows), 0.0)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_in_jax(function):
    with jax.enable_x64(True):
        traced = jax.jit(function)
        for c in THRESHOLDS:
            assert_within(traced(jnp.asarray(ROWS), c), c)
        assert_within(jax.jit(lambda rows: function(rows, 0.0))(jnp.asarray(ROWS)), 0.0)


@pytest.mark.parametrize("ord", [2, -math.inf])
@pytest.mark.parametrize("c", [0.0, 2.0**-1065])
def test_whole_trees_in_jax_with_a_threshold_known_while_tracing(ord, c):
    with jax.enable_x64(True):
        clip = jax.jit(lambda row: gradclip.clip_by_global_norm(row, c, ord=ord)[0])
        for row in ROWS:
            assert_within(clip(jnp.asarray(row)), c)
