"""Derivatives through clipped sums of factors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip


@pytest.mark.parametrize(("jitted", "closed"), [(False, True), (True, False), (True, True)])
def test_derivatives_are_those_of_gradients_that_are_made(jitted, closed):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.standard_normal((64, 64)) / 8), "b": jnp.asarray(rng.standard_normal(64))}
    x, y = (jnp.asarray(rng.standard_normal((5, 64))) for _ in range(2))

    def total(method, scale, params, x):
        def loss(params, x, y):
            h = jnp.tanh(x @ params["w"] + params["b"])
            return jnp.mean((h - y) ** 2) * (scale if closed else 1.0)

        # Of the norms, from 1.03 to 1.64, some are above: a clipped gradient does not depend on the scale.
        clipped = gradclip.clipped_grad(loss, 1.2, batch_argnums=(1, 2), method=method)
        call = jax.jit(clipped) if jitted else clipped
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(call(params, x, y)))

    given, both = (np.float32(1.0), params, x), {"ghost": total, "materialize": jax.jit(total, static_argnums=0)}
    found, expected = (jax.grad(call, argnums=(1, 2, 3))(method, *given) for method, call in both.items())
    assert (abs(expected[0]) > 1e-3) == closed
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5 * np.abs(other).max())


def test_second_derivatives_of_the_loss_count():
    # d/dw of the clipped sum of w x**2 / 2 by w: unclipped, each example adds x**2 once.
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 64)))
    w = jnp.eye(64)

    def trace(w, method):
        summed = gradclip.clipped_grad(lambda w, x: ((x @ w) ** 2).sum() / 2, 1e6, method=method)(w, x)
        return jnp.trace(summed)

    expected = np.einsum("br,bc->rc", x, x)
    np.testing.assert_allclose(jax.grad(trace)(w, "ghost"), expected, rtol=1e-5, atol=1e-5)


def test_a_tied_embedding_under_vmap():
    """`jax.vmap` batches the float64 products of a program outside 64-bit mode."""
    rng = np.random.default_rng(0)
    tables = jnp.asarray(rng.standard_normal((2, 300, 16)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 300, (4, 5)))

    def loss(table, tokens):
        return jnp.mean(jnp.sin(table[tokens] @ table.T))

    by_factors, made = (gradclip.clipped_grad(loss, 1e-3, method=method) for method in ("ghost", "materialize"))
    assert by_factors.plan(tables[0], tokens).ghost
    expected = jax.jit(jax.vmap(lambda table: made(table, tokens)))(tables)
    for wrapped in (lambda function: function, jax.jit):
        found = jax.vmap(wrapped(lambda table: by_factors(table, tokens)))(tables)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-8)


def test_parts_of_a_parameter_under_vmap():
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in [(2, 64, 128), (4, 64)])

    def summed(method):
        clipped = gradclip.clipped_grad(
            lambda w, x: jnp.sum(jnp.tanh(x @ w[:, :64]) * (x @ w[:, 64:])), 1, method=method
        )
        return jax.jit(jax.vmap(lambda w: clipped(w, x)))(w)

    np.testing.assert_allclose(summed("ghost"), summed("materialize"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("jitted", [False, True])
def test_no_tracer_outlives_its_trace(jitted):
    rng = np.random.default_rng(0)
    w, x = jnp.asarray(rng.standard_normal((64, 64)), jnp.float32), jnp.asarray(rng.standard_normal((8, 64)), "f")
    clipped = gradclip.clipped_grad(lambda w, x: jnp.tanh(x @ w).sum(), 1.0, method="ghost", pad_to=8)
    call = jax.jit(lambda *args: clipped(*args)) if jitted else clipped
    with jax.checking_leaks():
        checked = call(w, x)
    np.testing.assert_allclose(checked, clipped(w, x), rtol=1e-6)
