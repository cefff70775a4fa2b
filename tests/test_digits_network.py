"""The network and its data: shapes, and scores of a network that can be worked out in the head."""

import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

training = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "digits_network.py")))
CLASSES, HIDDEN, Parameters = training.CLASSES, training.HIDDEN, training.Parameters


def blind(output_bias):
    """Return a network that sees nothing, so that it scores each digit by its bias."""
    return Parameters(
        recurrent=jnp.eye(HIDDEN),
        input=jnp.zeros(HIDDEN),
        bias=jnp.zeros(HIDDEN),
        output=jnp.ones((HIDDEN, CLASSES)),
        output_bias=jnp.asarray(output_bias, jnp.float32),
    )


def test_the_digits_are_split_once():
    digits = training.load()
    assert digits.train_pixels.shape == (1438, 64)
    assert digits.test_pixels.shape == (359, 64)
    assert (float(digits.train_pixels.min()), float(digits.train_pixels.max())) == (0.0, 1.0)
    assert set(np.asarray(digits.test_digits).tolist()) == set(range(10))
    assert (digits.test_digits == training.load().test_digits).all()


def test_a_seed_draws_an_orthogonal_matrix_of_its_own():
    first, second = training.init(0).recurrent, training.init(1).recurrent
    np.testing.assert_allclose(first @ first.T, np.eye(HIDDEN), atol=1e-5)
    assert (training.init(0).recurrent == first).all()
    assert not np.allclose(first, second)


def test_guessing_costs_the_logarithm_of_ten():
    pixels, digits = jnp.ones((3, 64)), jnp.array([1, 7, 7])
    assert float(training.loss(blind(np.zeros(CLASSES)), pixels, digits)) == pytest.approx(math.log(10))
    always_seven = blind(np.eye(CLASSES)[7])
    assert float(training.accuracy(always_seven, pixels, digits)) == pytest.approx(2 / 3)


def test_scores_that_are_not_finite_are_wrong():
    pixels = jnp.ones((2, 64))
    for bad in (math.nan, math.inf):
        network = blind(np.full(CLASSES, bad))
        assert float(training.accuracy(network, pixels, jnp.array([0, 0]))) == 0.0
