"""Derivatives of clipping that tapes take, beside PyTorch's of the same calls."""

import numpy as np
import pytest
import tensorflow as tf
import torch

import gradclip

MODES = ("eager", "function", "xla")
WEIGHTS = [1.0, 2.0, 3.0]
PLACES = {"clipped": ([3.0, 4.0, 0.0], 1.0), "kept": ([3.0, 4.0, 0.0], 10.0), "zero": ([0.0, 0.0, 0.0], 1.0)}


def called(function, mode, *args):
    call = function if mode == "eager" else tf.function(function, jit_compile=mode == "xla")
    return [np.asarray(x) for x in call(*args)]


def of_tape(x, threshold, call):
    with tf.GradientTape() as tape:
        tape.watch([x, threshold])
        clipped, norm = call(x, threshold)
        value = tf.reduce_sum(clipped * tf.constant(WEIGHTS)) + norm
    return tape.gradient(value, [x, threshold], unconnected_gradients=tf.UnconnectedGradients.ZERO)


def of_torch(x, threshold, call):
    x, threshold = (torch.tensor(one, requires_grad=True) for one in (x, threshold))
    clipped, norm = call(x, threshold)
    value = (clipped * torch.tensor(WEIGHTS)).sum() + norm
    return [one.numpy() for one in torch.autograd.grad(value, [x, threshold], materialize_grads=True)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["propagate", "zero", "drop"])
def test_gradients_are_those_of_pytorch_and_finite_at_zero(place, mode, policy):
    x, threshold = PLACES[place]

    def call(x, threshold):
        return gradclip.clip_by_global_norm(x, threshold, nonfinite=policy)

    found = called(lambda *args: of_tape(*args, call), mode, tf.constant(x), tf.constant(threshold))
    for mine, known in zip(found, of_torch(x, threshold, call), strict=True):
        np.testing.assert_allclose(mine, known, rtol=1e-6, atol=1e-6)
        assert np.isfinite(mine).all()


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_norms_and_values(mode):
    x = tf.constant([3.0, 4.0, 0.0])

    def gradients(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            norm, largest = gradclip.global_norm([x]), gradclip.global_norm([x], ord=np.inf)
            clamped = gradclip.clip_by_value(x, 3.5)
        return tape.gradient(norm, x), tape.gradient(largest, x), tape.gradient(clamped, x)

    norm, largest, clamped = called(gradients, mode, x)
    np.testing.assert_allclose(norm, [0.6, 0.8, 0.0], rtol=1e-6)
    assert largest.tolist() == [0.0, 1.0, 0.0]
    assert clamped.tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("recorded", [False, True])
def test_second_derivatives(recorded):
    x = [3.0, 4.0, 0.0]

    def value(x, total):
        clipped, norm = gradclip.clip_by_global_norm(x, 1.0)
        return total(clipped * (tf.constant(WEIGHTS) if total is tf.reduce_sum else torch.tensor(WEIGHTS))) + norm**2

    def hessian(x):
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                made = value(x, tf.reduce_sum)
            gradient = inner.gradient(made, x)
        return outer.jacobian(gradient, x, experimental_use_pfor=False)

    found = (tf.function(hessian) if recorded else hessian)(tf.constant(x))
    known = torch.autograd.functional.hessian(lambda x: value(x, torch.sum), torch.tensor(x))
    np.testing.assert_allclose(found, known.numpy(), rtol=1e-5, atol=1e-6)


def test_forward_mode():
    x = tf.constant([3.0, 4.0, 0.0])
    with tf.autodiff.ForwardAccumulator(x, tf.ones(3)) as accumulator:
        clipped, norm = gradclip.clip_by_global_norm(x, 1.0)
    # k dx - k x <x, dx> / ||x||**2, and <x, dx> / ||x||, with k = 1 / 5
    np.testing.assert_allclose(accumulator.jvp(clipped), [0.032, -0.024, 0.2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(accumulator.jvp(norm), 1.4, rtol=1e-6)


def test_a_variable_gets_the_gradient_of_its_value():
    variable = tf.Variable([3.0, 4.0])
    with tf.GradientTape() as tape:
        norm = gradclip.global_norm([variable])
    np.testing.assert_allclose(tape.gradient(norm, variable), [0.6, 0.8], rtol=1e-6)


def test_sums_over_examples():
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    with tf.GradientTape() as tape:
        given = tf.constant(x)
        tape.watch(given)
        value = tf.reduce_sum(gradclip.per_example_clip(given, 1.0)[0] ** 2)
    known = torch.tensor(x, requires_grad=True)
    (gradient,) = torch.autograd.grad((gradclip.per_example_clip(known, 1.0)[0] ** 2).sum(), [known])
    np.testing.assert_allclose(tape.gradient(value, given), gradient.numpy(), rtol=1e-5, atol=1e-6)
