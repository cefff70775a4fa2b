"""Derivatives for float64 arrays of JAX while its 64-bit mode is off."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip

with jax.enable_x64(True):
    X = jnp.array([3.0, 4.0])

ALONG = np.array([0.128, -0.096])  # the derivative of the first clipped element

first_of = {
    "global": (lambda x: gradclip.clip_by_global_norm(x, 1.0)[0][0], ALONG),
    "beside float32": (lambda x: gradclip.clip_by_global_norm([x, jnp.zeros(1)], 1.0)[0][0][0], ALONG),
    "layer": (lambda x: gradclip.clip_by_layer_norm([x], 1.0)[0][0][0], ALONG),
    "example": (lambda x: gradclip.per_example_clip(x[None], 1.0)[0][0], ALONG),
    "norm": (gradclip.global_norm, [0.6, 0.8]),
    "largest": (lambda x: gradclip.global_norm(x, "inf"), [0.0, 1.0]),
    "value": (lambda x: gradclip.clip_by_value(x, 3.5)[0], [1.0, 0.0]),
}


@pytest.mark.parametrize(("function", "expected"), first_of.values(), ids=first_of)
def test_are_float64_too(function, expected):
    gradient = jax.grad(function)
    _, along = jax.jvp(function, (X,), (X,))
    for found, wanted in ((gradient(X), expected), (jax.jit(gradient)(X), expected), (along, np.dot(expected, X))):
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, wanted, rtol=1e-13, atol=1e-14)
