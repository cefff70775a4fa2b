"""Functions of one example over a batch, for JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip


def test_a_callback_that_has_no_batching_rule():
    def square(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda v: np.asarray(v) ** 2, shape, x)

    fun = lambda p, x: (p * square(x)).sum()
    batch = jnp.array([[3.0, 4.0], [0.1, 0.2]])
    with pytest.raises(Exception, match="vmap"):
        gradclip.clipped_grad(fun, 100.0)(jnp.ones(2), batch)
    for call in (gradclip.clipped_grad(fun, 100.0, method="loop"),):
        np.testing.assert_allclose(call(jnp.ones(2), batch), [9.01, 16.04], rtol=1e-6)
        np.testing.assert_allclose(jax.jit(call)(jnp.ones(2), batch), [9.01, 16.04], rtol=1e-6)
