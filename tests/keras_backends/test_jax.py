"""Training without state, as JAX compiles it."""

import jax
import jax.numpy as jnp
import keras
import pytest

from keras_backends.known_gradients import SGD


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
