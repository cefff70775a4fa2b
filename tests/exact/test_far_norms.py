"""Norms at and beyond the ends of float64's range, where a compiler that reorders divisions would leave it."""

import math
from contextlib import nullcontext
from fractions import Fraction
from unittest import mock

import jax
import numpy as np
import pytest

import gradclip
import gradclip._src.backends.jax.host as jax_backend
from rational import at_most, power_of_norm

ROWS, COLUMNS = 120, 5
# XLA reads subnormal numbers as zeros, which its norms allow for: near them they are loose.
LOWEST = 1e-290
GRID = 2**40
TIGHT = 1 - Fraction(1, 10**5)
FAR = (([2.0**1023] * 5, 1e300), ([1e308, 1.0, 0.0, 1e308, -1e308], 1e-300))
NEAR = (([1e-306] * 5, 1e-310), ([0.0] * 5, 1e-320), ([3e-305, 4e300, 0, 0, 1], 1e-20), ([1e300, 1, 1, 1, 1], 1e308))


@pytest.fixture(params=["kernels", "operations"])
def traced(request):
    """Traced calls in 64-bit mode, with the kernels and without."""
    without = mock.patch.object(jax_backend, "usable", return_value=False)
    with jax.enable_x64(True), nullcontext() if request.param == "kernels" else without:
        yield


def drawn(seed):
    """Return rows of all magnitudes, many at the upper end, and a threshold for each."""
    rng = np.random.default_rng(seed)
    exponents = rng.uniform(-300, 308.2, size=(ROWS, 1))
    rows = rng.uniform(0.1, 1, size=(ROWS, COLUMNS)) * 10.0**exponents
    rows[::4] = 10.0 ** rng.uniform(300, 308.2, size=rows[::4].shape)
    rows[1::4] = 10.0 ** rng.uniform(-300, 308.2, size=rows[1::4].shape)
    rows[2::8] = rng.choice([2.0**1022, 2.0**1023, 1e308, 1.79e308], size=(len(rows[2::8]), 1))
    thresholds = 10.0 ** rng.uniform(-300, 308.2, size=ROWS)
    with np.errstate(over="ignore"):
        thresholds[::3] = np.minimum(rows[::3].max(axis=1) * rng.uniform(0.01, 3, size=len(rows[::3])), 1.7e308)
    thresholds[:4] = 1.0, 1e-320, 1e300, 1.7e308
    return rows * rng.choice([-1.0, 1.0], size=rows.shape), thresholds


def assert_clipped(x, threshold, y, ord=2):
    """Check the bound, and that what exceeds the threshold ends just below it."""
    assert np.isfinite(y).all(), (x, threshold, y)
    assert at_most([y], ord, threshold), (x, threshold, y)
    if at_most([x], ord, threshold):
        assert np.array_equal(x, y) or norm_ratio(x, threshold, ord) > TIGHT, (x, threshold, y)
    elif threshold > LOWEST:
        assert norm_ratio(y, threshold, ord) > TIGHT, (x, threshold, y)


def norm_ratio(y, threshold, ord):
    """Return the norm over the threshold, to the power that makes it rational, at most 1 if it is."""
    return power_of_norm([y], ord) / Fraction(threshold) ** (1 if math.isinf(ord) else ord)


def over_rows(function):
    return jax.jit(jax.vmap(function))


@pytest.mark.parametrize("ord", [1, 2, 3])
def test_rows_are_clipped_right(traced, ord):
    rows, thresholds = drawn(1)
    found = over_rows(lambda x, c: gradclip.clip_by_global_norm([x[:1], x[1:]], c, ord=ord)[0])(rows, thresholds)
    for x, c, y in zip(rows, thresholds, np.hstack(found), strict=True):
        assert_clipped(x, c, y, ord)


def test_one_tree_is_clipped_right_to_many_thresholds(traced):
    x, thresholds = np.full(5, 1e308), drawn(2)[1]
    found = jax.jit(jax.vmap(lambda x, c: gradclip.clip_by_global_norm(x, c)[0], (None, 0)))(x, thresholds)
    for c, y in zip(thresholds, found, strict=True):
        assert_clipped(x, c, np.asarray(y))


def every_clip(x, threshold):
    return (
        gradclip.clip_by_global_norm(x, threshold)[0],
        gradclip.clip_by_layer_norm([x], [threshold])[0][0],
        gradclip.per_example_clip([x[None]], [threshold])[0][0],
    )


def test_trees_layers_and_examples_are_clipped_right(traced):
    clip = jax.jit(lambda x, c: every_clip(x, c))
    for values, threshold in FAR + NEAR:
        for y in clip(np.array(values), threshold):
            assert_clipped(np.array(values), threshold, np.asarray(y))


def test_known_thresholds(traced):
    for values, threshold in FAR:
        for y in jax.jit(lambda x, c=threshold: every_clip(x, c))(np.array(values)):
            assert_clipped(np.array(values), threshold, np.asarray(y))


@pytest.mark.parametrize(
    ("rule", "to_unit"), [("clip", False), ("clip", True), ("normalize", False), ("automatic", True)]
)
def test_examples_by_every_rule(traced, rule, to_unit):
    rows, thresholds = drawn(3)
    clip = lambda x, c: gradclip.per_example_clip(x[None], c, rule=rule, to_unit=to_unit)
    found, info = over_rows(clip)(rows, thresholds)
    for x, c, y, count in zip(rows, thresholds, np.asarray(found), info.num_clipped, strict=True):
        limit = 1.0 if to_unit else c
        assert np.isfinite(y).all(), (x, c, y)
        assert at_most([y], 2, limit), (x, c, y)
        fits = at_most([x], 2, c)
        assert bool(count) != fits
        if (rule == "normalize" or not fits) and limit > LOWEST and (rule != "automatic" or abs(x).max() > 1e4):
            assert norm_ratio(y, limit, 2) > TIGHT, (x, c, y)


def test_examples_on_a_grid(traced):
    rows, thresholds = drawn(4)
    rows[0] = 1e-224
    thresholds = np.maximum(thresholds, LOWEST)
    clip = lambda x, c: gradclip.per_example_clip(x[None], c, grid=GRID)[0]
    for x, c, y in zip(rows, thresholds, np.asarray(over_rows(clip)(rows, thresholds)), strict=True):
        steps = sum(int(v) ** 2 for v in y)
        assert steps <= GRID**2, (x, c, y)
        assert at_most([x], 2, c) or steps > TIGHT * GRID**2, (x, c, y)


@pytest.mark.parametrize("name", ["numpy", "jit"])
def test_layers_of_examples_share_the_smallest_thresholds(name):
    clip = lambda grads, c: gradclip.per_example_clip(grads, c, per_layer=True)[0]
    clip = jax.jit(clip) if name == "jit" else clip
    for steps in (1, 3, 4, 7, 1001):
        threshold = steps * 2.0**-1074
        with jax.enable_x64(True):
            found = clip([np.full((1, 1), 1e-300)] * 3, threshold)
        assert at_most(found, 2, threshold)


def test_examples_and_thresholds_without_an_inverse():
    summed, _ = gradclip.per_example_clip(np.array([[0.0, 0.0], [3.0, 4.0]], np.float32), 1e-320, to_unit=True)
    np.testing.assert_allclose(summed, [0.6, 0.8], rtol=1e-6)
    summed, _ = gradclip.per_example_clip(np.full((1, 4), 1e308), 5.0, to_unit=True)
    np.testing.assert_allclose(summed, [0.5] * 4, rtol=1e-14)
