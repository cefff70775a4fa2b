"""Gradients of the largest and the smallest magnitude: never all zeros, and shared equally."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip

EXTREMES = ("inf", "-inf")


def complex_rows(dtype, count=60, columns=5):
    rng = np.random.default_rng(5)
    return (rng.normal(size=(count, columns)) + 1j * rng.normal(size=(count, columns))).astype(dtype)


def direction(x, ord):
    """Return the conjugate of the derivative of the extreme magnitude at x."""
    magnitudes = np.abs(x.astype(complex))
    at = magnitudes.argmax() if ord == "inf" else magnitudes.argmin()
    return np.where(np.arange(len(x)) == at, x / magnitudes, 0)


@pytest.mark.parametrize("ord", EXTREMES)
@pytest.mark.parametrize("split", [False, True])
def test_complex_gradients_in_jax(ord, split):
    rows = complex_rows(np.complex64)
    norm = lambda x: gradclip.global_norm([x[:2], x[2:], jnp.zeros((0, 3))] if split else x, ord)
    clipped = lambda x: gradclip.clip_by_global_norm(x, 0.01, ord=ord)[1]
    for function in (norm, clipped):
        found = np.conj(jax.jit(jax.vmap(jax.grad(function)))(rows))
        for x, slopes in zip(rows, found, strict=True):
            np.testing.assert_allclose(slopes, direction(x, ord), atol=1e-6)


@pytest.mark.parametrize("ord", EXTREMES)
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_gradients_in_torch(ord, dtype):
    for row in complex_rows(dtype, 20):
        x = torch.tensor(row, requires_grad=True)
        norm = gradclip.global_norm([x[:2], x[2:]], ord)
        np.testing.assert_allclose(torch.autograd.grad(norm, x)[0], direction(row, ord), atol=1e-6)


@pytest.mark.parametrize("ord", EXTREMES)
def test_ties_share_the_derivative(ord):
    values = np.array([3 + 4j, -5, 4 - 3j, 5j], np.complex64)
    expected = values / 20
    np.testing.assert_allclose(np.conj(jax.grad(lambda x: gradclip.global_norm(x, ord))(values)), expected, rtol=1e-6)
    x = torch.tensor(values, requires_grad=True)
    gradclip.global_norm(x, ord).backward()
    np.testing.assert_allclose(x.grad, expected, rtol=1e-6)


@pytest.mark.parametrize("ord", EXTREMES)
def test_a_complex_extreme_that_another_device_may_hold(ord):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.PartitionSpec("d")
    local = lambda x: gradclip.global_norm(x, ord, axis_name="d")
    norm = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=jax.sharding.PartitionSpec())
    slopes = jax.jit(jax.grad(norm))
    for x in complex_rows(np.complex64, 12):
        np.testing.assert_allclose(np.conj(slopes(x)), direction(x, ord), atol=1e-6)


@pytest.mark.parametrize("ord", [1, 2, 3, "inf"])
def test_large_gradients_pass_what_stays(ord):
    """The inner product of both is out of range, but it counts nothing."""
    x, slopes = np.array([2e30, -1e30], np.float32), np.array([3e20, 4e20], np.float32)
    clip = lambda x: gradclip.clip_by_global_norm(x, 1e35, ord=ord)[0]
    assert jax.vjp(clip, jnp.array(x))[1](jnp.array(slopes))[0].tolist() == slopes.tolist()
    assert jax.jvp(clip, (jnp.array(x),), (jnp.array(slopes),))[1].tolist() == slopes.tolist()
    given = torch.tensor(x, requires_grad=True)
    assert torch.autograd.grad(clip(given), given, torch.tensor(slopes))[0].tolist() == slopes.tolist()


def test_a_smallest_magnitude_far_below_the_others_lets_gradients_pass():
    given = torch.tensor([1e-30, 1e30], requires_grad=True)
    clipped, _ = gradclip.clip_by_global_norm(given, 1.0, ord="-inf")
    assert torch.autograd.grad(clipped, given, torch.tensor([1.0, 2.0]))[0].tolist() == [1.0, 2.0]
