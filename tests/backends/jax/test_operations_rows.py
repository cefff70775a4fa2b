"""Sums over a batch, a few examples at a time: every number of them, and those that add nothing."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradclip._src.backends.jax.operations import as_rows, sum_by_rows
from gradclip._src.core.rules import Factors


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 9])
def test_each_example_has_its_own_weight(count, dtype):
    rows = np.random.default_rng(count).integers(-8, 8, (count, 2, 3))
    weights = 2.0 ** np.arange(count)
    blank = np.arange(count) == 2

    def summed(x):
        with jax.enable_x64(True):
            factors = Factors(jnp.asarray(weights), None)
            chosen = SimpleNamespace(weights=lambda xp: factors, blank=jnp.asarray(blank))
            return sum_by_rows(x, chosen, lambda row: row.astype(jnp.float64))

    found = summed(jnp.asarray(rows, dtype))
    assert (found.shape, found.dtype) == ((2, 3), "float64")
    assert found.tolist() == np.einsum("i...,i->...", rows, np.where(blank, 0.0, weights)).tolist()


def test_rows_keep_the_first_axes():
    x = jnp.zeros((2, 3, 4, 5))
    assert [as_rows(x, axes).shape for axes in (1, 2)] == [(2, 60), (2, 3, 20)]
    assert as_rows(jnp.zeros(7), 1).shape == (7, 1)
