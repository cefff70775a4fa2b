"""How numbers are read from their bits, and several sums made by one reduction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from frameworks import numpy_dtype
from gradclip._src.backends.jax.operations import as_integers, both_kinds, sums

DTYPES = ("float16", "bfloat16", "float32")


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


def all_kinds(dtype):
    limits = jnp.finfo(dtype)
    tiny, step = float(limits.tiny), float(limits.smallest_subnormal)
    values = [0.0, step, 3 * step, tiny - step, tiny, 1.0, float(limits.max)]
    return np.array([*values, *(-value for value in values)]).astype(numpy_dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_numbers_are_read(dtype):
    x = all_kinds(dtype)
    assert np.array_equal(jax.jit(as_integers)(x), x.astype(np.float64))
    normal, below = jax.jit(both_kinds)(x)
    assert np.array_equal(np.abs(normal) + below, np.abs(x.astype(np.float64)))
    assert not np.any(np.asarray(normal) * np.asarray(below))


def test_sums_over_axes():
    a, b = sums([jnp.ones((2, 3)), jnp.full((2, 3), 2.0)], (1,))
    assert (a.tolist(), b.tolist()) == ([3.0, 3.0], [6.0, 6.0])
