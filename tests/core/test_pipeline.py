"""Whether anything is clipped: not where the norm is at most the threshold, and equal counts as such."""

import math

import numpy as np
import pytest

import gradclip
from frameworks import PAIRS, by_name


def clip(framework, tree, max_norm, ord=2):
    clipped, norm = framework.call(lambda t: gradclip.clip_by_global_norm(t, max_norm, ord=ord), tree)
    return framework.numbers(clipped), float(norm)


@pytest.mark.parametrize(("framework", "dtype"), PAIRS, ids=by_name)
def test_below_the_threshold_bits_stay(framework, dtype):
    x = np.array([3.0, -0.0, 1e-7, -1.0])
    array = framework.array(x + 1j * x if "complex" in dtype else x, dtype)
    for max_norm in (7.0, math.inf):
        clipped, _ = clip(framework, array, max_norm)
        assert clipped.tobytes() == framework.to_numpy(array).tobytes()
        assert clipped.dtype == framework.to_numpy(array).dtype


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
@pytest.mark.parametrize(
    ("values", "max_norm", "ord"),
    [
        ([3.0, 4.0], 5.0, 2),
        ([0.1, 0.2], 0.1 + 0.2, 1),
        ([3.0, 4.0, 5.0], 6.0, 3),
        ([5.0], 5.0, 2.5),
        ([3, -7], 7, "inf"),
    ],
)
def test_a_norm_equal_to_the_threshold_is_left_alone_where_values_are_known(name, values, max_norm, ord):
    framework = next(f for f, _ in PAIRS if f.name == name)
    dtype = "float64" if "float64" in framework.dtypes else "float32"
    array = framework.array(values, dtype)
    exact = math.fsum(map(abs, framework.to_numpy(array).tolist())) if ord == 1 else max_norm
    clipped, _ = clip(framework, array, exact, ord)
    assert clipped.tobytes() == framework.to_numpy(array).tobytes()
