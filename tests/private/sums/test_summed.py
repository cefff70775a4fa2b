"""What sums over examples hold: masked, empty, tiny and of half types, in the dtype asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.core.formats import bare_name


def clip(framework, grads, *args, **kwargs):
    summed, info = framework.call(lambda g: gradclip.per_example_clip(g, *args, **kwargs), grads)
    return framework.numbers(summed), info


@pytest.mark.parametrize("nonfinite", ["drop", "zero", "propagate"])
def test_masked_examples_contribute_exactly_zero(framework, nonfinite):
    grads = framework.array([[3.0, 4.0], [np.nan, np.inf], [1e30, -1e30]])
    mask = np.array([True, False, False])
    summed, info = clip(framework, grads, 1.0, mask=mask, nonfinite=nonfinite)
    np.testing.assert_allclose(summed, [0.6, 0.8], rtol=1e-6)
    assert int(info.num_clipped) == 1
    assert framework.to_numpy(info.norms).tolist() == [5.0, 0.0, 0.0]


def test_sums_of_halves_are_float32(framework):
    grads = framework.array(np.full((4096, 1), 1.0), "bfloat16")
    summed, _ = clip(framework, grads, 2.0)
    assert summed.dtype == np.float32
    assert summed.tolist() == [4096.0]


def test_tiny_halves_do_not_escape(framework):
    grads = framework.array(np.full((2, 2), 1e-4), "float16")
    summed, info = clip(framework, grads, 1e-4)
    assert int(info.num_clipped) == 2
    np.testing.assert_allclose(summed, [2e-4 / 2**0.5] * 2, rtol=1e-6)


def test_an_empty_batch_gives_zeros(framework):
    summed, info = clip(framework, [framework.array(np.zeros((0, 3)))], 1.0)
    assert summed[0].tolist() == [0.0, 0.0, 0.0]
    assert int(info.num_clipped) == 0


@pytest.mark.parametrize("sum_dtype", ["float32", "float64", np.float64, torch.float32, jnp.float32, None])
def test_sums_have_the_dtype_asked_for(framework, sum_dtype):
    expected = "float64" if "64" in str(sum_dtype) else "float32"
    clip = lambda g: gradclip.per_example_clip(g, 1.0, sum_dtype=sum_dtype)
    grads = framework.array([[3.0, 4.0]], "float16")
    if expected == "float64" and "jax" in framework.name:
        with pytest.raises(ValueError, match="64-bit mode"):
            framework.call(clip, grads)
        with jax.enable_x64(True):
            summed, _ = framework.call(clip, grads)
    else:
        summed, _ = framework.call(clip, grads)
    assert bare_name(summed.dtype) == expected


@pytest.mark.parametrize("sum_dtype", ["float16", torch.bfloat16, "int8", int])
def test_narrow_sums_are_refused(sum_dtype):
    with pytest.raises(ValueError, match="sum_dtype must be float32, float64 or None"):
        gradclip.per_example_clip(np.ones((2, 2)), 1.0, sum_dtype=sum_dtype)
