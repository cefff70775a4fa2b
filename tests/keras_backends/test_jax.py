"""Training without state, as JAX compiles it."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from gradclip import SpreadRule
from keras_backends.known_gradients import SGD, linear_model, train, weights
from keras_backends.test_thresholds import Recorder, on_host


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "with a loss scale"])
def test_stateless_steps_that_are_compiled(wrapped):
    inner = SGD(learning_rate=1.0, max_norm=1.0)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0) if wrapped else inner
    variable = keras.Variable([0.0, 0.0])
    optimizer.build([variable])
    step = jax.jit(optimizer.stateless_apply)
    weights, state = [variable.value], [each.value for each in optimizer.variables]
    for gradient in ([3.0, 4.0], [0.03, 0.04]):
        weights, state = step(state, [jnp.array(gradient) * (4.0 if wrapped else 1.0)], weights)
    assert weights[0].tolist() == pytest.approx([-0.63, -0.84])
    # Nothing is kept outside of what the step returns.
    assert (float(inner.last_norm), float(inner.clipped_share)) == (0.0, 0.0)
    for kept, value in zip(optimizer.variables, state, strict=True):
        kept.assign(value)
    assert (float(inner.last_norm), float(inner.clipped_share)) == (pytest.approx(0.05), 0.5)


def test_errors_about_values_are_refused_in_compiled_code():
    optimizer = SGD(learning_rate=1.0, max_norm=1.0, nonfinite="raise")
    variable = keras.Variable([0.0])
    optimizer.build([variable])
    with pytest.raises(ValueError, match=r"nonfinite='raise' needs the values .*run_eagerly=True.*last_norm"):
        jax.jit(optimizer.stateless_apply)([v.value for v in optimizer.variables], [jnp.ones(1)], [variable.value])


@pytest.fixture
def _eight_devices():
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    yield
    keras.distribution.set_distribution(None)


@pytest.mark.usefixtures("_eight_devices")
def test_devices_that_share_a_batch_keep_one_history():
    rule, recorder = SpreadRule(window=4), Recorder()
    model = linear_model(SGD(1.0, max_norm=rule))
    rows = np.random.default_rng(0).normal(size=(48, 2)).astype(np.float32)
    train(model, rows, batch_size=8, callbacks=[recorder])
    norms, thresholds = zip(*recorder.seen, strict=True)
    assert norms == pytest.approx(np.linalg.norm(rows.reshape(6, 8, 2).mean(axis=1), axis=1))
    assert list(thresholds) == on_host(rule, norms)
    assert weights(model).any()
    (history,) = [variable.value for variable in model.optimizer.variables if variable.name == "norms"]
    parts = [np.asarray(part.data).tolist() for part in history.addressable_shards]
    assert parts == [[float(np.float32(norm)) for norm in norms[:1:-1]]] * 8


def test_stateless_steps_keep_the_history_in_what_they_return():
    optimizer = SGD(learning_rate=1.0, max_norm=SpreadRule(window=4))
    variable = keras.Variable([0.0, 0.0])
    optimizer.build([variable])
    step = jax.jit(optimizer.stateless_apply)
    first = [each.value for each in optimizer.variables]
    weights, state = [variable.value], first
    for scale in (1.0, 10.0):
        weights, state = step(state, [jnp.array([3.0, 4.0]) * scale], weights)
    assert weights[0].tolist() == pytest.approx([-6.0, -8.0])
    assert [each.value is one for each, one in zip(optimizer.variables, first, strict=True)] == [True] * len(first)
