"""Sums of small, middle and big numbers, each in its own unit, and how they are joined."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradclip._src.backends.jax.traced import by_range, joined


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


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
