"""How numbers are read from their bits, and several sums made by one reduction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from frameworks import numpy_dtype
from gradclip.backends.jax.reading import as_integers, both_kinds, by_range, extremes, joined, magnitude_bits, sums

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


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_bits_are_in_the_order_of_magnitudes(dtype):
    bits = np.asarray(magnitude_bits(jnp.asarray(all_kinds(dtype)[:7])))
    assert (np.diff(bits.astype(np.int64)) > 0).all()
    nan, infinity = magnitude_bits(jnp.array([-np.nan, -np.inf], dtype))
    assert nan > infinity > bits.max()


def test_sums_and_extremes_over_axes():
    a, b = sums([jnp.ones((2, 3)), jnp.full((2, 3), 2.0)], (1,))
    assert (a.tolist(), b.tolist()) == ([3.0, 3.0], [6.0, 6.0])
    largest, smallest = extremes(jnp.array([[3, 1], [2, 5]], jnp.uint32), (1,))
    assert (largest.tolist(), smallest.tolist()) == ([3, 5], [1, 2])


@pytest.mark.parametrize(("x", "place"), [(2.0**-401, 0), (2.0**-400, 1), (-(2.0**480), 1), (2.0**481, 2)])
def test_ranges(x, place):
    found = [float(one) for one in by_range(jnp.float64(x))]
    assert found.pop(place) == abs(x) * (2.0**600, 1.0, 2.0**-600)[place]
    assert found == [0.0, 0.0]


@pytest.mark.parametrize(
    ("given", "total", "divisor"),
    [
        ((4.0, 0.0, 0.0), 4.0, 2.0**-600),
        ((4.0, 9.0, 0.0), 9.0, 1.0),
        ((4.0, 9.0, 16.0), 16.0, 2.0**600),
        ((0.0, 0.0, 0.0), 0.0, 1.0),
        ((0.0, np.nan, 16.0), np.nan, 2.0**600),
        ((4.0, np.nan, 0.0), np.nan, 1.0),
    ],
)
def test_sums_of_ranges_are_joined(given, total, divisor):
    found = joined(list(map(jnp.float64, given)), 2)
    np.testing.assert_array_equal(found, (total, divisor))


def test_sums_of_ranges_that_meet_count_both():
    """2**40 numbers just below the limit beside one above it, and so for small ones: none is nothing beside another."""
    total, _ = joined([jnp.float64(2.0**440), jnp.float64(2.0**-800), jnp.float64(0.0)], 2)
    assert float(total) == 2.0**-800 + 2.0**-760
    total, _ = joined([jnp.float64(0.0), jnp.float64(2.0**1000), jnp.float64(2.0**-240)], 2)
    assert float(total) == 2.0**-240 + 2.0**-200
