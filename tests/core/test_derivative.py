import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip

X = np.array([3.0, -4.0, 1.0], np.float32)
ORDERS = [1, 1.5, 2, 3, "inf", "-inf"]


def smooth_clip(x, ord, xp):
    """The textbook formula, which frameworks differentiate by themselves."""
    p = float(ord)
    magnitudes = xp.abs(x)
    if np.isinf(p):
        norm = magnitudes.max() if p > 0 else magnitudes.min()
    else:
        norm = (magnitudes**p).sum() ** (1 / p)
    return 0.5 * x / norm


@pytest.mark.parametrize("ord", ORDERS)
def test_jax_gradient_is_that_of_the_formula(ord):
    weights = jnp.array([0.3, -0.7, 1.1])
    ours = jax.grad(lambda x: gradclip.clip_by_global_norm(x, 0.5, ord=ord)[0] @ weights)(jnp.array(X))
    theirs = jax.grad(lambda x: smooth_clip(x, ord, jnp) @ weights)(jnp.array(X))
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("through", ["autograd", "func"])
def test_torch_gradient_is_that_of_the_formula(ord, through):
    weights = torch.tensor([0.3, -0.7, 1.1])
    ours = lambda x: gradclip.clip_by_global_norm(x, 0.5, ord=ord)[0] @ weights
    theirs = lambda x: smooth_clip(x, ord, torch) @ weights
    x = torch.tensor(X, requires_grad=True)
    if through == "autograd":
        got = torch.autograd.grad(ours(x), x)[0]
    else:
        got = torch.func.grad(ours)(x.detach())
    np.testing.assert_allclose(got, torch.autograd.grad(theirs(x), x)[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("ord", ORDERS)
def test_gradients_are_finite_at_zero(ord):
    zero = jnp.zeros(3)
    assert jax.grad(lambda x: gradclip.global_norm(x, ord))(zero).tolist() == [0.0] * 3
    assert jax.grad(lambda x: gradclip.clip_by_global_norm(x, 1.0, ord=ord)[0].sum())(zero).tolist() == [1.0] * 3
    x = torch.zeros(3, requires_grad=True)
    gradclip.global_norm(x, ord).backward()
    assert x.grad.tolist() == [0.0] * 3


def test_below_the_threshold_the_gradient_passes():
    assert jax.grad(lambda x: gradclip.clip_by_global_norm(x, 9.0)[0][1])(jnp.array(X)).tolist() == [0.0, 1.0, 0.0]


def test_gradient_of_the_threshold():
    total = jax.grad(lambda c: gradclip.clip_by_global_norm(jnp.array([3.0, 4.0]), c)[0].sum())(1.0)
    assert float(total) == pytest.approx(1.4, rel=1e-6)


def test_forward_mode_second_derivatives_and_batches():
    first = lambda x: gradclip.clip_by_global_norm({"x": x}, 1.0)[0]["x"][0]
    of = lambda x: (jax.jacfwd(first)(x), jax.jacrev(first)(x), jax.hessian(first)(x))
    forward, reverse, second = jax.jit(of)(np.array([3.0, 4.0], np.float32))
    np.testing.assert_allclose(forward, reverse, rtol=1e-6)
    np.testing.assert_allclose(second, [[-0.04608, 0.00256], [0.00256, 0.02208]], rtol=1e-4, atol=1e-7)
    batch = jnp.array([[3.0, 4.0], [0.3, 0.4]])
    np.testing.assert_allclose(jax.vmap(jax.grad(first))(batch), [[0.128, -0.096], [1.0, 0.0]], rtol=1e-5, atol=1e-7)
    torch_first = lambda x: gradclip.clip_by_global_norm({"x": x}, 1.0)[0]["x"][0]
    got = torch.func.vmap(torch.func.grad(torch_first))(torch.tensor(np.array(batch)))
    np.testing.assert_allclose(got, [[0.128, -0.096], [1.0, 0.0]], rtol=1e-5, atol=1e-7)


def test_policies_under_differentiation():
    x = jnp.array([3.0, jnp.nan, 4.0])
    clip = lambda policy: lambda x: gradclip.clip_by_global_norm(x, 1.0, nonfinite=policy)[0][0]
    np.testing.assert_allclose(jax.grad(clip("zero"))(x), [0.128, 0.0, -0.096], rtol=1e-5)
    assert jax.grad(clip("drop"))(x).tolist() == [0.0] * 3
    assert np.isnan(jax.grad(clip("propagate"))(x)).any()
