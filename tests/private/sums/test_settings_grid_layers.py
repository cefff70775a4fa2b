"""Layers on a grid: all of them in the same steps, so that an example of all layers stays within the grid."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.private.sums.clip import layer_shares
from gradclip._src.private.sums.settings import grid_for, smallest_grid

RULES = ("clip", "normalize", "automatic")
FRAMEWORKS = {"numpy": np.asarray, "torch": torch.as_tensor, "jax": jnp.asarray}
SIZES = ((1,), (1, 1), (1, 1, 1), (30, 1, 7), (16, 16, 16, 16), (100, 3, 3, 3, 3))


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def clipped(array, leaves, max_norm=1.0, **options):
    summed, _ = gradclip.per_example_clip([array(x) for x in leaves], max_norm, per_layer=True, **options)
    return [[int(v) for v in np.asarray(x)] for x in summed]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("array", FRAMEWORKS.values(), ids=FRAMEWORKS)
@pytest.mark.parametrize("uniform", [True, False])
def test_an_example_of_many_layers_is_within_the_grid_exactly(array, rule, uniform):
    rng = np.random.default_rng(0)
    for sizes in SIZES:
        for grid in (20, 1000, 2**45):
            leaves = [rng.normal(size=(1, n)) * 10.0 ** rng.uniform(2, 6) for n in sizes]
            steps = clipped(array, leaves, 0.3, grid=grid, rule=rule, uniform=uniform)
            assert sum(v**2 for x in steps for v in x) <= grid**2


@pytest.mark.parametrize("array", FRAMEWORKS.values(), ids=FRAMEWORKS)
@pytest.mark.parametrize("uniform", [True, False])
def test_each_sum_is_in_steps_of_the_threshold(array, uniform):
    rng = np.random.default_rng(1)
    for sizes in SIZES:
        leaves = [rng.normal(size=(9, n)) * 10.0 ** rng.uniform(-3, 3, (9, 1)) for n in sizes]
        on = clipped(array, leaves, 2.0, grid=2**30, uniform=uniform)
        off, _ = gradclip.per_example_clip(leaves, 2.0, per_layer=True, uniform=uniform)
        for steps, expected in zip(on, off, strict=True):
            np.testing.assert_allclose(np.array(steps) * (2.0 / 2**30), expected, rtol=0, atol=1e-6)


def test_two_layers_of_one_number():
    steps = clipped(np.asarray, [[[10.0]], [[10.0]]], grid=2**20)
    assert steps[0] == steps[1]
    assert 0.9999 * 2**40 < 2 * steps[0][0] ** 2 <= 2**40
    promised = gradclip.clipped_sum_sensitivity(1.0, per_layer=True, grid=2**20, batch_size=1)
    assert Fraction(2 * steps[0][0] ** 2, 2**40) <= Fraction(promised.total) ** 2 == 1


@pytest.mark.parametrize("max_norm", [{"a": 3.0, "b": 0.25}, {"a": 1e-3, "b": 1e3}])
def test_each_of_several_thresholds_has_its_own_steps(max_norm):
    grads = {"a": np.full((1, 5), 1e9), "b": np.full((1, 2), -1e9)}
    summed, _ = gradclip.per_example_clip(grads, max_norm, grid=2**20)
    moved = [Fraction(c) ** 2 * sum(int(v) ** 2 for v in summed[k]) / 2**40 for k, c in max_norm.items()]
    promised = gradclip.clipped_sum_sensitivity(max_norm, grid=2**20, batch_size=1)
    assert 0.999 * promised.total**2 < sum(moved) <= Fraction(promised.total) ** 2


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_smallest_grid_of_a_layer(sizes, uniform):
    for size, share in zip(sizes, layer_shares(sizes, uniform=uniform), strict=True):
        smallest = smallest_grid(size, share)
        assert (2 * (smallest - 1) * Fraction(share)) ** 2 <= size < (2 * smallest * Fraction(share)) ** 2
        for grid in (smallest, smallest + 1, 2**30, 2**52):
            room = grid * Fraction(share) - Fraction(grid_for(grid, size, 1, share).steps)
            assert 4 * room**2 >= size


def test_a_grid_too_coarse_for_a_layer_is_refused():
    leaves = [np.ones((2, 100)), np.ones((2, 1)), np.ones((2, 1)), np.ones((2, 1))]
    with pytest.raises(ValueError, match=r"a layer that is clipped to 0.5 of max_norm.*smallest grid that works is 11"):
        clipped(np.asarray, leaves, grid=10)
    assert math.isqrt(sum(v**2 for v in clipped(np.asarray, leaves, grid=11)[0])) <= 11
