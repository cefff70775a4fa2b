"""Derivatives that are taken outside of the `tf.function` that clips: those of eager code."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import gradclip

pytestmark = pytest.mark.xdist_group("tensorflow")
X = np.array([[3.0, 4.0], [1.0, -2.0]], np.float32)
WEIGHTS = np.array([[1.0, 2.0], [0.5, -3.0]], np.float32)


def rows(x, c):
    slices = tf.IndexedSlices(x, tf.constant([1, 1]), tf.constant([3, 2]))
    clipped, norm = gradclip.clip_by_global_norm(slices, c)
    return clipped.values, norm


CALLS = {
    "global": gradclip.clip_by_global_norm,
    "zero": lambda x, c: gradclip.clip_by_global_norm(x, c, nonfinite="zero"),
    "layers": lambda x, c: gradclip.clip_by_layer_norm([x], c),
    "units": lambda x, c: gradclip.clip_by_unit_norm(x, c, unit_axis=0),
    "adaptive": lambda x, c: gradclip.adaptive_grad_clip(x, x * x / 50, clipping=c),
    "value": lambda x, c: (gradclip.clip_by_value(x, c), c),
    "examples": lambda x, c: gradclip.per_example_clip(x, c, mask=x[:, 0] > 0)[:1],
    "rows": rows,
}


def value(name, x, c):
    """Return a number that depends on every result, with second derivatives."""
    clipped, *norms = tf.nest.flatten(CALLS[name](x, c))
    return sum((tf.reduce_sum(norm) ** 2 for norm in norms), tf.reduce_sum((clipped * WEIGHTS) ** 2))


def in_cond(name, x, c):
    return tf.cond(c > 0.0, lambda: value(name, x, c), lambda: c)


def in_branches(name, x, c):
    """A branch within a branch."""
    square, inside = x * x / 4, lambda: tf.cond(c > 0.0, lambda: value(name, square, c), lambda: c)
    return tf.switch_case(tf.cast(c > 0.0, tf.int32), [lambda: c, lambda: inside() + value(name, x, c)])


def first(call, given):
    with tf.GradientTape() as tape:
        tape.watch(given)
        made = call(*given)
    return tape.gradient(made, given, unconnected_gradients="zero")


def second(call, given):
    with tf.GradientTape() as tape:
        tape.watch(given)
        slopes = first(call, given)
        total = sum(tf.reduce_sum(tf.sin(slope)) for slope in slopes)
    return tape.gradient(total, given, unconnected_gradients="zero")


def forward(call, given):
    with tf.autodiff.ForwardAccumulator(given, [tf.constant(WEIGHTS), tf.constant(0.5)]) as accumulator:
        made = call(*given)
    return [accumulator.jvp(made)]


def compare(kind, place, name, **options):
    given, call = [tf.constant(X), tf.constant(1.5)], partial(place, name)
    found, expected = kind(tf.function(call, autograph=False, **options), given), kind(call, given)
    for ours, known in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, known, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("name", CALLS)
def test_a_branch_that_reads_tensors_from_around_it_has_derivatives(name):
    compare(first, in_cond, name)


@pytest.mark.parametrize("name", CALLS)
def test_tapes_around_a_function_take_the_derivative_twice(name):
    compare(second, value, name)


@pytest.mark.parametrize("name", CALLS)
def test_forward_accumulators_around_a_function_take_the_derivative(name):
    compare(forward, value, name)


@pytest.mark.parametrize("kind", [second, forward])
def test_second_derivatives_and_forward_mode_pass_branches_within_branches(kind):
    compare(kind, in_branches, "global")


def test_a_compiled_function_has_derivatives_in_branches_and_twice():
    compare(first, in_cond, "global", jit_compile=True)
    compare(second, value, "global", jit_compile=True)


def test_branches_that_autograph_writes_have_derivatives():
    @tf.function
    def clipped_if_large(x, c):
        if tf.reduce_max(x) > c:
            return tf.reduce_sum(gradclip.clip_by_global_norm(x, c)[0] * WEIGHTS)
        return c

    given = [tf.constant(X), tf.constant(1.5)]
    expected = first(lambda x, c: tf.reduce_sum(gradclip.clip_by_global_norm(x, c)[0] * WEIGHTS), given)
    for ours, known in zip(first(clipped_if_large, given), expected, strict=True):
        np.testing.assert_allclose(ours, known, rtol=1e-5, atol=1e-6)
