"""What `per_example_clip` offers, by way of `clipped_grad`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip


@pytest.mark.parametrize("microbatch_size", [None, 1, 3, 8])
def test_sums_on_a_grid_do_not_depend_on_microbatches(microbatch_size):
    with jax.enable_x64(True):
        weights, batch = (
            jnp.ones(5, jnp.float32),
            jnp.asarray(np.random.default_rng(0).normal(size=(8, 5)), jnp.float32),
        )
        loss = lambda w, x: jnp.sum(jnp.tanh(x @ w)) * 9.0
        whole = gradclip.clipped_grad(loss, 1.0, grid=10**6)(weights, batch)
        parts = gradclip.clipped_grad(loss, 1.0, grid=10**6, microbatch_size=microbatch_size)
        assert whole.dtype == jnp.int64
        assert jnp.array_equal(jax.jit(parts)(weights, batch), whole)
        assert parts.sensitivity().rounding == 0.0
    with pytest.raises(ValueError, match="leave out normalize_by"):
        gradclip.clipped_grad(loss, 1.0, grid=10, normalize_by=2.0)


@pytest.mark.parametrize("rule", ["normalize", "automatic"])
def test_rules_and_groups_reach_the_sum(rule):
    weights = {"a": jnp.ones(3), "b": jnp.ones(2)}
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(6, 3)), jnp.float32)
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w["a"])) + jnp.sum(w["b"]) * x[0, 0]
    got = gradclip.clipped_grad(loss, {"a": 1.0, "b": 0.5}, rule=rule, microbatch_size=4)(weights, rows)
    grads = jax.vmap(lambda x: jax.grad(loss)(weights, x[None]))(rows)
    expected, _ = gradclip.per_example_clip(grads, {"a": 1.0, "b": 0.5}, rule=rule)
    for key in weights:
        np.testing.assert_allclose(got[key], expected[key], rtol=1e-5)
