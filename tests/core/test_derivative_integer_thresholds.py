"""Thresholds that are integers, known or traced, wherever JAX differentiates; booleans and complex ones are none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip

CLIPS = {
    "global": lambda x, c: gradclip.clip_by_global_norm(x, c)[0],
    "layer": lambda x, c: gradclip.clip_by_layer_norm({"a": x}, c)[0]["a"],
    "layers": lambda x, c: gradclip.clip_by_layer_norm({"a": x}, {"a": c})[0]["a"],
    "examples": lambda x, c: gradclip.per_example_clip(x[None], c)[0],
    "examples by layer": lambda x, c: gradclip.per_example_clip([x[None]], c, per_layer=True)[0][0],
    "value": lambda x, c: gradclip.clip_by_value(x, c),
}
every_clip = pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
X = jnp.array([3.0, 4.0])
THRESHOLDS = (1, np.int8(1), np.int32(1), np.uint8(1))


@every_clip
def test_derivatives_are_those_of_a_float(clip):
    total = lambda x, c: clip(x, c) @ jnp.array([1.0, 2.0])
    everywhere = {
        "grad": lambda x, c: jax.grad(total)(x, c),
        "vjp": lambda x, c: jax.vjp(total, x, c)[1](1.0)[0],
        "jvp": lambda x, c: jax.jvp(lambda x: total(x, c), (x,), (x + 1,))[1],
    }
    derivative = lambda x, c: [function(x, c) for function in everywhere.values()]
    expected = derivative(X, 1.0)
    compiled = jax.jit(derivative)
    for threshold in THRESHOLDS:
        for function in (derivative, compiled):
            for found, wanted in zip(function(X, threshold), expected, strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


@every_clip
def test_a_tangent_of_an_integer_counts_nothing(clip):
    no_change = np.zeros((), jax.dtypes.float0)
    values, change = jax.jvp(jax.jit(clip), (X, 1), (jnp.zeros(2), no_change))
    np.testing.assert_allclose(values, clip(X, 1.0), rtol=1e-6)
    np.testing.assert_allclose(change, [0.0, 0.0], atol=1e-7)


@every_clip
@pytest.mark.parametrize("bad", [True, 1j])
def test_booleans_and_complex_numbers_are_no_thresholds(clip, bad):
    for call in (clip, jax.jit(clip)):
        with pytest.raises(TypeError, match="must be a real number or a scalar array"):
            call(X, jnp.asarray(bad))
    with pytest.raises(TypeError, match="must be a real number or a scalar array"):
        clip(torch.tensor([3.0, 4.0]), torch.tensor(bad))
