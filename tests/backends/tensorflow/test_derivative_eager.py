"""Derivatives through the clipping of eager tensors: those of PyTorch, in both modes, to the second order."""

import numpy as np
import pytest
import tensorflow as tf
import torch

import gradclip
from gradclip._src import look
from gradclip._src.backends.tensorflow.framework import HOST

pytestmark = pytest.mark.xdist_group("tensorflow")
RNG = np.random.default_rng(0)
A, B = RNG.normal(size=(4, 3)).astype(np.float32), RNG.normal(size=5).astype(np.float32)
CA, CB = RNG.normal(size=(4, 3)).astype(np.float32), RNG.normal(size=5).astype(np.float32)


def clipped_and_norm(tree, c, **options):
    clipped, norm = gradclip.clip_by_global_norm(tree, c, **options)
    return clipped, [norm]


def by_layers(tree, c):
    clipped, norms = gradclip.clip_by_layer_norm(tree, c)
    return clipped, list(norms)


CALLS = {
    "global": clipped_and_norm,
    "order 1": lambda tree, c: clipped_and_norm(tree, c, ord=1),
    "order 3": lambda tree, c: clipped_and_norm(tree, c, ord=3),
    "largest": lambda tree, c: clipped_and_norm(tree, c, ord="inf"),
    "zero": lambda tree, c: clipped_and_norm(tree, c, nonfinite="zero"),
    "layers": by_layers,
    "value": lambda tree, c: (gradclip.clip_by_value(tree, c), []),
    "units": lambda tree, c: (gradclip.clip_by_unit_norm(tree, c, unit_axis=0)[0], []),
    "norm": lambda tree, c: ([], [gradclip.global_norm(tree)]),
}


def loss(results, total, real, imag, array=tf.constant):
    """Return a number that depends on every result in a way of its own."""
    clipped, norms = results
    parts = []
    for x, numbers in zip(clipped, (CA, CB), strict=False):  # a norm alone has none
        factor, other = array(numbers), array(numbers[::-1].copy())
        if "complex" in str(x.dtype):
            parts += [total(real(x) * factor), total(imag(x) * other)]
        else:
            parts.append(total(x * factor))
    return sum(parts) + sum(0.3 * norm for norm in norms)


def of_tensorflow(call, leaves, c, *, twice):
    given = [tf.constant(x) for x in (*leaves, c)]
    with tf.GradientTape() as outer:
        outer.watch(given)
        with tf.GradientTape() as tape:
            tape.watch(given)
            value = loss(call(given[:-1], given[-1]), tf.reduce_sum, tf.math.real, tf.math.imag)
        first = tape.gradient(value, given, unconnected_gradients="zero")
        total = sum(tf.reduce_sum(tf.sin(x)) for x in first) if twice else None
    second = outer.gradient(total, given, unconnected_gradients="zero") if twice else []
    return [x.numpy() for x in (*first, *second)]


def of_pytorch(call, leaves, c, *, twice):
    given = [torch.tensor(x, requires_grad=True) for x in (*leaves, c)]
    value = loss(call(given[:-1], given[-1]), torch.sum, torch.real, torch.imag, torch.from_numpy)
    first = torch.autograd.grad(value, given, create_graph=True, materialize_grads=True)
    total = sum(torch.sin(x).sum() for x in first)
    second = [torch.zeros_like(x) for x in given] if twice else []
    if twice and total.requires_grad:
        second = torch.autograd.grad(total, given, materialize_grads=True)
    return [x.detach().numpy() for x in (*first, *second)]


@pytest.mark.parametrize("threshold", [0.7, 50.0])
@pytest.mark.parametrize("name", CALLS)
def test_tapes_take_the_derivative_twice(name, threshold):
    found, expected = (of(CALLS[name], (A, B), np.float32(threshold), twice=True) for of in (of_tensorflow, of_pytorch))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "value"])
def test_complex_numbers_have_derivatives(name):
    leaves = (A + 1j * A[::-1] ** 2).astype(np.complex64), B
    found, expected = (of(CALLS[name], leaves, np.float32(0.7), twice=False) for of in (of_tensorflow, of_pytorch))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128])
def test_derivatives_are_finite_at_zero_and_have_the_dtype_of_the_leaf(dtype):
    for x in (tf.zeros(3, dtype), tf.cast(tf.constant([3.0, 0.0, 4.0]), dtype)):
        for ord in (1, 2, 3, "inf"):
            with tf.GradientTape() as tape:
                tape.watch(x)
                results = gradclip.clip_by_global_norm(x, 1.0, ord=ord)
            found = tape.gradient(results, x)
            assert found.dtype == dtype
            assert np.isfinite(found.numpy().astype(complex)).all()


def test_forward_accumulators_take_the_derivative():
    x = tf.constant([3.0, 4.0])
    with tf.autodiff.ForwardAccumulator(x, tf.constant([1.0, 0.0])) as accumulator:
        clipped, norm = gradclip.clip_by_global_norm(x, 1.0)
    np.testing.assert_allclose(accumulator.jvp(clipped), [0.128, -0.096], rtol=1e-5)
    np.testing.assert_allclose(accumulator.jvp(norm), 0.6, rtol=1e-6)


def test_variables_and_thresholds_have_derivatives():
    variable, threshold = tf.Variable([3.0, 4.0]), tf.Variable(1.0)
    with tf.GradientTape() as tape:
        clipped, _ = gradclip.clip_by_global_norm([variable], threshold)
        value = tf.reduce_sum(clipped[0] * [1.0, 2.0])
    found, slope = tape.gradient(value, [variable, threshold])
    np.testing.assert_allclose(found, [-0.064, 0.048], rtol=1e-5)
    np.testing.assert_allclose(slope, 2.2, rtol=1e-6)


def test_only_what_somebody_watches_takes_the_longer_way():
    watched, other = tf.constant([3.0, 4.0]), tf.constant([1.0])
    assert HOST.plain([watched, other])
    with tf.GradientTape() as tape:
        assert HOST.plain([watched])
        tape.watch(watched)
        assert not HOST.plain([other, watched])
        assert HOST.plain([other])
        assert not HOST.plain([tf.Variable([1.0])])
        assert look.read([watched]) is None
        with tape.stop_recording():
            assert look.read([watched]) is not None
    with tf.autodiff.ForwardAccumulator(watched, watched):
        assert not HOST.plain([watched])
