"""Eager calls of whole batches in JAX see what the loss closes over as it is now, also in programs that are kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.standard_normal((128, 128)) / 12, jnp.float32)
X = jnp.asarray(RNG.standard_normal((64, 128)), jnp.float32)


class Loss:
    scale, array, numpy, steps, squared, slope = 1.0, jnp.ones(()), np.ones(1, np.float32), 1, False, 1.0

    def __call__(self, w, x):
        slope = self.slope

        @jax.custom_jvp
        def same(x):
            return x

        same.defjvp(lambda x, tangent: (x[0], tangent[0] * slope))
        for _ in range(self.steps):
            x = jnp.tanh(x @ (w * w if self.squared else w))
        return jnp.sum(same(x) * self.array * self.numpy) * self.scale


CHANGES = {
    "scale": 3.0,
    "array": jnp.float32(5.0),
    "numpy": np.full(1, 7, np.float32),
    "steps": 3,
    "squared": True,
    "slope": 2.0,
}


@pytest.mark.parametrize("settings", [{}, {"pad_to": 64}])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_the_loss_closes_over_is_seen(name, settings):
    loss = Loss()
    clipped = gradclip.clipped_grad(loss, 1e6, **settings)
    assert clipped.plan(W, X).ghost
    before = clipped(W, X)
    setattr(loss, name, CHANGES[name])
    expected = jax.grad(loss)(W, X)
    after = clipped(W, X)
    assert not np.allclose(before, after, rtol=0.1)
    np.testing.assert_allclose(after, expected, rtol=1e-3, atol=1e-4 * float(jnp.abs(expected).max()))
    setattr(loss, name, getattr(Loss, name))
    np.testing.assert_array_equal(clipped(W, X), before)


@pytest.mark.parametrize("call", [lambda f: f, jax.jit])
def test_the_plan_follows_what_the_loss_closes_over(call):
    """Several terms may cancel, and the sensitivity counts that."""
    loss = Loss()
    clipped = gradclip.clipped_grad(loss, 1.0)
    call(lambda *args: clipped(*args))(W, X)
    before = clipped.sensitivity("replace_one", batch_size=64).rounding
    loss.steps = 2
    with pytest.warns(RuntimeWarning, match="Call sensitivity"):
        call(lambda *args: clipped(*args))(W, X)
    assert clipped.sensitivity("replace_one", batch_size=64).rounding > before


def test_equal_functions_are_compiled_once():
    loss = Loss()
    clipped = gradclip.clipped_grad(loss, 1e6)
    clipped(W, X)
    programs = dict(clipped._programs)
    assert len(programs) == 1
    for _ in range(2):
        clipped(W, X)
    assert clipped._programs == programs


def test_calls_without_jit():
    clipped = gradclip.clipped_grad(Loss(), 1.0)
    with jax.disable_jit():
        found = clipped(W, X)
    np.testing.assert_allclose(found, clipped(W, X), rtol=1e-4, atol=1e-5)
