import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip
from frameworks import ALL, PAIRS, by_name


def clip(framework, tree, max_norm, ord=2):
    clipped, norm = framework.call(lambda t: gradclip.clip_by_global_norm(t, max_norm, ord=ord), tree)
    return framework.numbers(clipped), float(norm)


@pytest.mark.parametrize(("framework", "dtype"), PAIRS, ids=by_name)
def test_above_the_threshold_the_norm_is_the_threshold(framework, dtype):
    clipped, norm = clip(framework, framework.array([3.0, 4.0], dtype), 1.0)
    step = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "complex64": 2.0**-23}.get(dtype, 2.0**-47)
    assert norm == 5.0
    # Rounding to nearest, as on accelerators and of float32 everywhere, costs up to four units in the last place.
    nearest = framework.name == "torch-device" or dtype in ("float32", "complex64")
    np.testing.assert_allclose(clipped.astype(complex), [0.6, 0.8], rtol=4 * step if nearest else step)
    assert (np.abs(clipped.astype(complex)) <= [0.6, 0.8]).all()


def test_zero_threshold(framework):
    clipped, norm = clip(framework, framework.array([3.0, 4.0]), 0.0)
    assert clipped.tolist() == [0.0, 0.0]
    assert norm == 5.0
    zeros, norm = clip(framework, framework.array([0.0, -0.0]), 0.0)
    assert zeros.tobytes() == np.array([0.0, -0.0], np.float32).tobytes()
    assert norm == 0.0


def test_infinite_threshold_of_a_norm_beyond_float32(framework):
    x = framework.array(np.full(100, 3e38))
    assert clip(framework, x, math.inf)[0].tobytes() == framework.to_numpy(x).tobytes()


def test_traced_thresholds():
    clip = jax.jit(lambda x, c: gradclip.clip_by_global_norm(x, c)[0])
    x = jnp.array([3.0, 4.0])
    np.testing.assert_allclose(clip(x, 1.0), [0.6, 0.8], rtol=2e-7)
    assert clip(x, -1.0).tolist() == [0.0, 0.0]
    assert clip(x, 0).tolist() == [0.0, 0.0]
    assert clip(x, jnp.inf).tolist() == [3.0, 4.0]
    assert np.isnan(clip(x, jnp.nan)).all()


def test_float64_norms_beyond_what_a_coefficient_can_hold():
    x = np.array([1e308, -1e308, 1.0])
    smallest = 0.5**0.5 * 1e-308  # below the normal range, where numbers are 5e-324 apart
    np.testing.assert_allclose(gradclip.clip_by_global_norm(x, 1.0)[0][:2], [0.5**0.5, -(0.5**0.5)], rtol=1e-14)
    np.testing.assert_allclose(gradclip.clip_by_global_norm(x, 1.0)[0][2], smallest, rtol=1e-13)
    np.testing.assert_allclose(
        gradclip.clip_by_global_norm(x, 1e-150)[0][:2], [0.5**0.5 * 1e-150, -(0.5**0.5) * 1e-150]
    )
    assert gradclip.clip_by_global_norm(x, 5e-324)[0].tolist() == [0.0, -0.0, 0.0]


@pytest.mark.parametrize("name", ["numpy", "torch", "torch-device", "jax-x64"])
def test_a_norm_whose_inverse_overflows_is_a_norm(name):
    framework = next(f for f in ALL if f.name == name)
    x = np.array([60, -80]) * 2.0**-1074
    with framework.mode():
        clipped, norm = gradclip.clip_by_global_norm(framework.array(x, "float64"), 0.5)
        summed, info = gradclip.per_example_clip(framework.array([x, [3.0, 4.0]], "float64"), 5.0)
    assert framework.to_numpy(clipped).tolist() == x.tolist()
    assert float(norm) == 100 * 2.0**-1074
    assert framework.to_numpy(summed).tolist() == pytest.approx([3.0, 4.0], rel=1e-12)
    assert framework.to_numpy(info.norms).tolist() == [100 * 2.0**-1074, 5.0]
