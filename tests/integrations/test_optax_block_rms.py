"""The mean square after `clip_by_block_rms`, in exact arithmetic, for thresholds of every dtype."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradclip.integrations.optax import clip_by_block_rms
from rational import power_of_norm

SIZES = (1, 2, 3, 4, 7, 64, 1000)
KINDS = {
    "float": float,
    "float16": jnp.float16,
    "bfloat16": jnp.bfloat16,
    "float32": jnp.float32,
    "numpy float16": np.float16,
    "integer": lambda value: max(1, int(value)),
}


def clipped(updates, threshold):
    transformation = clip_by_block_rms(threshold)
    return transformation.update(updates, transformation.init(updates))[0]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("way", ["known", "traced"])
def test_the_bound_holds_exactly(make, way):
    rng = np.random.default_rng(4)
    updates = [jnp.asarray(100 * rng.normal(size=size), jnp.float32) for size in SIZES]
    compiled = jax.jit(clipped)
    for value in (0.1, 0.7, 1.0, 3.3, *rng.uniform(0.01, 5, size=20)):
        threshold = make(value)
        found = (clipped if way == "known" else compiled)(updates, threshold)
        # A Python float is traced as a float32.
        limit = np.float32(threshold) if way == "traced" else threshold
        for x, y in zip(updates, found, strict=True):
            most = Fraction(float(limit)) ** 2 * x.size
            if power_of_norm([x], 2) > most:
                assert (1 - Fraction(1, 10**5)) * most <= power_of_norm([y], 2) <= most, (value, x.size)
            else:
                assert np.array_equal(x, y)


def test_extreme_thresholds():
    with jax.enable_x64(True):
        large = jnp.full(100, 1.7e308)
        for threshold in (1e308, jnp.float64(1e308)):
            assert power_of_norm([clipped(large, threshold)], 2) <= 100 * Fraction(1e308) ** 2
        assert power_of_norm([jax.jit(clipped)(large, 1e308)], 2) <= 100 * Fraction(1e308) ** 2
    x = jnp.full(9, 2.0)
    assert clipped(x, 2.0).tolist() == x.tolist()
    assert jax.jit(clipped)(x, jnp.inf).tolist() == x.tolist()
    assert clipped(x, 5e-324).tolist() == [0.0] * 9
    assert jax.jit(clipped)(x, -1.0).tolist() == [0.0] * 9


@pytest.mark.parametrize("make", [jnp.float16, jnp.float32])
def test_the_threshold_has_a_derivative(make):
    total = lambda c: clipped(jnp.array([3.0, 4.0]), c).sum()
    slope = jax.jit(jax.grad(total))(make(1.0))
    assert slope.dtype == make
    assert float(slope) == pytest.approx(1.4 * 2**0.5, rel=1e-3)
