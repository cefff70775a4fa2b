"""Clipped elements keep their sign, and so do those that become zero: -0.0 stays -0.0 on every way.

One exception is known: float16 that PyTorch moves toward zero by a step (`core.one_factor`).
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
import torch

import gradclip
from frameworks import ALL, by_name, numpy_dtype
from gradclip._src.core.formats import format_named

LIMITS = (1.0, 1e-30, 0.0)  # results of every kind: normal, below the normal range, and zeros
BY_NORM = (
    gradclip.clip_by_global_norm,
    gradclip.clip_by_layer_norm,
    lambda tree, limit: gradclip.clip_by_unit_norm(tree, limit, unit_axis=0),
)


def clipped_each_way(arrays, limits=LIMITS, clips=BY_NORM):
    return [[clip([x], limit)[0][0] for limit in limits for clip in clips] for x in arrays]


def values(dtype):
    """Return zeros, the smallest numbers and ordinary ones of a dtype, each with both signs."""
    steps = np.array([0.0, 1.0, 3.0, 1000.0]) * format_named(dtype).step
    both = np.concatenate([steps, [2.0**-14, 3.0, 4.0], -steps, [-(2.0**-14), -3.0, -4.0]])
    return (both + 1j * both[::-1]).astype(dtype) if "complex" in dtype else both.astype(numpy_dtype(dtype))


def signs(array):
    return np.signbit(array.view(array.real.dtype) if array.dtype.kind == "c" else array)


def assert_signs(result, given, *, stepped=False):
    """All signs are those of the elements; of numbers that PyTorch steps, those that are not zero."""
    kept = result != 0 if stepped else slice(None)
    np.testing.assert_array_equal(signs(result[kept]), signs(given[kept]))


def assert_each_sign(framework, results, stepped=()):
    for dtype, each in zip(framework.dtypes, results, strict=True):
        for result in each:
            assert_signs(framework.to_numpy(result), values(dtype), stepped=dtype in stepped)


@pytest.mark.parametrize("framework", ALL, ids=by_name)
def test_new_arrays(framework):
    arrays = [framework.array(values(dtype), dtype) for dtype in framework.dtypes]
    stepped = ("float16",) if framework.name == "torch-device" else ()
    assert_each_sign(framework, framework.call(clipped_each_way, arrays), stepped)


@pytest.mark.parametrize("framework", [one for one in ALL if one.name.startswith("torch")], ids=by_name)
def test_in_place(framework):
    results = []
    for dtype in framework.dtypes:
        held = [SimpleNamespace(grad=framework.array(values(dtype), dtype)) for _ in LIMITS]
        with framework.mode():
            for one, limit in zip(held, LIMITS, strict=True):
                gradclip.clip_grad_norm_([one], limit)
        results.append([one.grad for one in held])
    assert_each_sign(framework, results, ("float16",) if framework.name == "torch-device" else ())


@pytest.mark.parametrize(
    ("name", "compiled"), [("torch", {"backend": "eager"}), ("tensorflow", {}), ("tensorflow", {"jit_compile": True})]
)
def test_compiled_code(name, compiled):
    framework = next(one for one in ALL if one.name == name)
    arrays = [framework.array(values(dtype), dtype) for dtype in framework.dtypes]
    compiler = torch.compile if name == "torch" else tf.function
    results = compiler(
        partial(clipped_each_way, limits=LIMITS[1:2], clips=BY_NORM[:1] if name == "torch" else BY_NORM), **compiled
    )(arrays)
    assert_each_sign(framework, results, ("float16",) if name == "torch" else ())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("limit", [0.0, np.zeros(())])
def test_values_clamped_to_zero_in_graphs(dtype, limit):
    given = np.array([0.0, -0.0, 3.0, -3.0, np.inf, -np.inf, -1e-40, np.nan], dtype)
    bound = limit if isinstance(limit, float) else tf.constant(limit)
    result = tf.function(gradclip.clip_by_value)(tf.constant(given), bound).numpy()
    assert_signs(result[:-1], given[:-1])
    assert (result[:-1] == 0).all()
    assert np.isnan(result[-1])
