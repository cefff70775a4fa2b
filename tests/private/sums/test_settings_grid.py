import math
from fractions import Fraction
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.private.sums.settings import grid_for, smallest_grid

RULES = ("clip", "normalize", "automatic")
FRAMEWORKS = {"numpy": np.asarray, "torch": torch.as_tensor, "jax": jnp.asarray, "jit": jnp.asarray}


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def on_grid(name, leaves, max_norm, mask=None, **options):
    clip = clipping(name, max_norm, **options)
    return [np.asarray(x) for x in clip([FRAMEWORKS[name](x) for x in leaves], mask)]


@cache
def clipping(name, max_norm, **options):
    clip = lambda g, mask: gradclip.per_example_clip(g, max_norm, mask=mask, **options)[0]
    return jax.jit(clip) if name == "jit" else clip


def batch(seed, examples, dtype=np.float32):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-6, 6, (examples, 1))
    return [(rng.normal(size=(examples, n)) * scale).astype(dtype) for n in (700, 30)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("grid", [14, 1000, 10**9])
def test_each_example_is_within_the_grid_exactly(name, rule, grid):
    leaves = batch(1, 20)
    for i in range(20):
        steps = on_grid(name, [x[i : i + 1] for x in leaves], 0.3, grid=grid, rule=rule)
        assert {x.dtype for x in steps} == {np.dtype(np.int64)}
        assert sum(int(v) ** 2 for x in steps for v in x) <= grid**2


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_sums_are_the_same_in_every_order_and_microbatch(name):
    leaves = batch(2, 24)
    whole = on_grid(name, leaves, 1.0, grid=10**9)
    order = np.random.default_rng(0).permutation(24)
    for size in (1, 5, 8):
        cuts = [order[start : start + size] for start in range(0, 24, size)]
        parts = [on_grid(name, [x[rows] for x in leaves], 1.0, grid=10**9) for rows in cuts]
        for total, pieces in zip(whole, zip(*parts, strict=True), strict=True):
            assert np.array_equal(total, sum(pieces))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_as_without_a_grid_but_for_its_steps(name):
    leaves = batch(3, 15)
    steps = on_grid(name, leaves, 2.0, grid=10**9)
    plain, _ = gradclip.per_example_clip([x.astype(np.float64) for x in leaves], 2.0)
    for on, off in zip(steps, plain, strict=True):
        np.testing.assert_allclose(on * (2.0 / 10**9), off, rtol=0, atol=15 * 2.0 * 40 / 10**9)


def test_one_example_moves_the_sum_by_at_most_the_grid_where_floating_point_does_not():
    """On a grid of 1e9 steps a float32 gradient's own rounding is 60 steps."""
    leaves = batch(4, 50)
    for i in range(50):
        rest = [np.delete(x, i, axis=0) for x in leaves]
        one, other = (on_grid("numpy", x, 1.0, grid=10**9) for x in (leaves, rest))
        moved = sum(
            Fraction(int(a) - int(b)) ** 2 for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
        )
        assert moved <= 10**18


def test_padding_and_what_is_not_finite_add_nothing():
    leaves = batch(5, 6)
    expected = on_grid("numpy", [x[2:] for x in leaves], 1.0, grid=10**6)
    leaves[0][0, 3], leaves[1][1, 0] = math.nan, math.inf
    for a, b in zip(on_grid("numpy", leaves, 1.0, grid=10**6), expected, strict=True):
        assert np.array_equal(a, b)
    got = on_grid("numpy", leaves, 1.0, grid=10**6, mask=np.arange(6) >= 2)
    assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("elements", [1, 2, 3, 4, 5, 15, 16, 17, 729, 730, 10**6, 10**6 + 1])
def test_the_smallest_grid_works_and_leaves_room_for_rounding(elements):
    smallest = smallest_grid(elements)
    assert 4 * (smallest - 1) ** 2 <= elements < 4 * smallest**2
    for grid in (smallest, smallest + 3, 1000 * smallest):
        room = grid - Fraction(grid_for(grid, elements, 1).steps)
        assert 4 * room**2 >= elements
        assert room < grid


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"grid": 0}, "grid must be the number of steps"),
        ({"grid": 2.5}, "grid must be the number of steps"),
        ({"grid": 2**53}, "grid must be the number of steps"),
        ({"grid": 1}, "smallest grid that works is 3"),
        ({"grid": 100, "sum_dtype": "float32"}, "Leave out sum_dtype"),
        ({"grid": 100, "max_norm": 0.0}, "positive and finite"),
        ({"grid": 100, "max_norm": math.inf}, "positive and finite"),
    ],
)
def test_what_does_not_go_together_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        gradclip.per_example_clip(np.ones((2, 16)), **{"max_norm": 1.0} | options)


def test_integers_need_room():
    with jax.enable_x64(False), pytest.raises(ValueError, match="64-bit mode"):
        gradclip.per_example_clip(jnp.ones((2, 3)), 1.0, grid=100)
    with pytest.raises(ValueError, match="may overflow int64"):
        grid_for(2**52, 3, 2**12)
    with pytest.raises(TypeError, match="the gradient is complex and cannot be rounded to a grid"):
        gradclip.per_example_clip(np.ones((2, 3), np.complex64), 1.0, grid=100)


@pytest.mark.parametrize("call", [gradclip.clipped_grad, gradclip.clipped_fun])
def test_integers_cannot_show_what_is_not_finite(call):
    with pytest.raises(
        ValueError, match=r"nonfinite='propagate' shows .* sums on a grid are integers. Pass nonfinite="
    ):
        gradclip.per_example_clip(np.array([[1.0, 2.0], [np.nan, 1.0]]), 1.0, grid=1000, nonfinite="propagate")
    with pytest.raises(ValueError, match="sums on a grid are integers"):
        call(lambda w: w, 1.0, grid=8, nonfinite="propagate")
    with pytest.raises(FloatingPointError):
        gradclip.per_example_clip(np.array([[np.nan, 1.0]]), 1.0, grid=1000, nonfinite="raise")
    assert gradclip.per_example_clip(np.array([[np.nan, 1.0]]), 2.0, grid=1000, nonfinite="zero")[0].tolist() == [
        0,
        500,
    ]
