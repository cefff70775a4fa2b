"""The private threshold: the published step, its bounds, the noise that is left, the same everywhere."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import gradclip
from gradclip import PrivateQuantile
from gradclip._src.core.formats import dtype_name

LIKE = {"numpy": np.zeros(()), "torch": torch.zeros(()), "jax": jnp.zeros(()), "tensorflow": tf.zeros(())}
AS_NUMBER = {"numpy": np.float32, "torch": torch.tensor, "jax": jnp.float32, "tensorflow": tf.constant}


@pytest.mark.parametrize("name", LIKE)
def test_a_step_is_the_published_one(name):
    rule = PrivateQuantile(quantile=0.7, learning_rate=0.3, initial=2.0)
    state, expected = rule.init(LIKE[name]), 2.0
    for noised in (0.1, 0.9, -0.2, 1.4, 0.7):
        state = rule.observe_fraction(state, AS_NUMBER[name](noised))
        expected *= math.exp(-0.3 * (min(1.0, max(0.0, noised)) - 0.7))
        assert float(rule.max_norm(state)) == pytest.approx(expected, rel=1e-6)
    assert dtype_name(rule.max_norm(state)) == "float32"


@pytest.mark.parametrize("name", LIKE)
def test_numbers_are_taken_too_and_the_steps_are_the_same(name):
    rule = PrivateQuantile()
    state, other = rule.init(LIKE[name]), rule.init()
    for noised in np.random.default_rng(1).normal(0.5, 0.4, 50):
        state, other = rule.observe_fraction(state, float(noised)), rule.observe_fraction(other, float(noised))
    assert float(state.log_norm) == pytest.approx(float(other.log_norm), rel=1e-5)


@pytest.mark.parametrize("name", LIKE)
def test_it_stays_within_its_bounds_and_nan_changes_nothing(name):
    rule = PrivateQuantile(learning_rate=10.0, lower=0.5, upper=4.0)
    for noised, bound in ((1.0, 0.5), (0.0, 4.0), (-math.inf, 4.0), (math.inf, 0.5)):
        state = rule.observe_fraction(rule.init(LIKE[name]), AS_NUMBER[name](noised))
        assert float(rule.max_norm(state)) == pytest.approx(bound)
    state = rule.init(LIKE[name])
    assert rule.observe_fraction(state, AS_NUMBER[name](math.nan)) == state


@pytest.mark.parametrize("name", LIKE)
@pytest.mark.parametrize("bound", [1e-6, 0.3, 7.0, 1e6, 3.4e38, 1.2e-38])
def test_no_rounding_leads_beyond_the_bounds(name, bound):
    for factor in (0.5, 2.0):
        lower, upper = sorted((bound, min(max(factor * bound, 1.2e-38), 3.4028234e38)))
        for initial in (lower, upper):
            rule = PrivateQuantile(initial=initial, lower=lower, upper=upper)
            assert np.float32(lower) * (1 - 2**-23) <= float(rule.max_norm(rule.init(LIKE[name]))) <= upper


def test_one_example_more_or_less_changes_what_is_noised_by_half():
    """Also where batches vary in size, which they do by that example."""
    rng, n = np.random.default_rng(3), 10
    grads = rng.standard_normal((n + 1, 3))

    def before_noise(batch):
        return len(batch) / 2 - int(gradclip.per_example_clip(batch, 1.5)[1].num_clipped)

    changes = [abs(before_noise(grads) - before_noise(np.delete(grads, i, axis=0))) for i in range(n + 1)]
    assert set(changes) == {0.5}


def test_it_finds_the_quantile_of_private_norms():
    """Half of the examples' norms are below the median of a log-normal, exp(1)."""
    rng, rule = np.random.default_rng(2), PrivateQuantile(initial=0.1)
    n, sigma_b, state = 200, 10.0, rule.init()
    seen = []
    for _ in range(400):
        batch = {"w": np.exp(rng.normal(1.0, 1.0, (n, 1)))}
        _, info = gradclip.per_example_clip(batch, rule.max_norm(state))
        noised = len(batch["w"]) / 2 - int(info.num_clipped) + rng.normal(0.0, sigma_b)
        state = rule.observe_fraction(state, 0.5 + noised / n)
        seen.append(float(rule.max_norm(state)))
    assert np.mean(seen[200:]) == pytest.approx(math.e, rel=0.05)


def test_it_runs_in_a_scan():
    rule = PrivateQuantile()
    state, _ = jax.lax.scan(lambda s, b: (rule.observe_fraction(s, b), None), rule.init(jnp.zeros(())), jnp.zeros(10))
    assert float(rule.max_norm(state)) == pytest.approx(math.exp(1.0))


@pytest.mark.parametrize(("z", "sigma_b"), [(1.0, 5.0), (0.7, 100.0), (3.0, 1.6), (1.0, 1e30)])
def test_both_noises_cost_what_one_would(z, sigma_b):
    z_delta = PrivateQuantile.gradient_noise(z, sigma_b)
    assert z_delta**-2 + (2 * sigma_b) ** -2 == pytest.approx(z**-2)
    assert z_delta >= z


def noises(rng):
    """Return noises of which one is often just below its limit, down to the last bit, and sometimes subnormal."""
    z = float(2.0 ** rng.choice([rng.uniform(-3, 3), rng.uniform(-1074, 100)]))
    near = 1 + float(2.0 ** rng.uniform(-53, 3))
    sigma_b = z / 2 * near if rng.integers(4) else math.nextafter(z / 2, math.inf)
    return z, sigma_b


def test_the_noise_that_is_left_is_the_smallest_float_that_is_enough():
    rng, tried = np.random.default_rng(5), 0
    for z, sigma_b in (noises(rng) for _ in range(500)):
        if not z < 2 * sigma_b <= 2**100:
            continue
        found = PrivateQuantile.gradient_noise(z, sigma_b)
        wanted = 1 / (1 / Fraction(z) ** 2 - 1 / Fraction(2 * sigma_b) ** 2)
        assert Fraction(math.nextafter(found, 0.0)) ** 2 < wanted <= Fraction(found) ** 2, (z, sigma_b)
        tried += 1
    assert tried > 400


def test_noise_near_its_limit():
    assert PrivateQuantile.gradient_noise(1.0, 0.5 + 2**-53) == pytest.approx(2**25.5)
    assert PrivateQuantile.gradient_noise(3.0, 1.5 + 2**-52) == pytest.approx(3**1.5 * 2**25)


@pytest.mark.parametrize("sigma_b", [0.5, 0.4])
def test_too_little_noise_on_the_fraction_is_an_error(sigma_b):
    with pytest.raises(ValueError, match=r"sigma_b must be above half of the noise multiplier, got sigma_b=0\.\d and "):
        PrivateQuantile.gradient_noise(1.0, sigma_b)


@pytest.mark.parametrize("noises", [(0.0, 1.0), (1.0, 0.0), (math.inf, 1.0), (1.0, math.nan), (-1.0, 1.0)])
def test_noises_are_positive(noises):
    with pytest.raises(ValueError, match=r"must be above 0\.0"):
        PrivateQuantile.gradient_noise(*noises)


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"quantile": 1.1}, ValueError, "quantile must be"),
        ({"learning_rate": 0}, ValueError, "learning_rate must be above"),
        ({"initial": "1"}, TypeError, "initial must be a number"),
        ({"upper": math.inf}, ValueError, "upper must be"),
        ({"lower": 2.0}, ValueError, "lower <= initial <= upper must hold, got 2.0, 1.0 and 1000000.0"),
    ],
)
def test_settings_are_checked(settings, kind, words):
    with pytest.raises(kind, match=words):
        PrivateQuantile(**settings)


def test_a_state_is_like_an_array():
    with pytest.raises(TypeError, match="like must be an array of NumPy, PyTorch, JAX, TensorFlow or MLX"):
        PrivateQuantile().init("cpu")
