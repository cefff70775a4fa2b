"""Batches on which the sums of other libraries are wrong, beside what is right, worked out by hand."""

import math
from fractions import Fraction
from functools import cache

import jax
import numpy as np
import pytest

import gradclip
from frameworks import WITH_FLOAT32
from gradclip._src.core.formats import dtype_name
from rational import power_of_norm

WAYS = ("per_example_clip", "clipped_grad", "clipped_grad in microbatches")
DIFFERENTIATED = ("torch", "jax", "tensorflow")
CASES = [(f, way) for f in WITH_FLOAT32 for way in WAYS[: None if f.name.startswith(DIFFERENTIATED) else 1]]
everywhere = pytest.mark.parametrize(("framework", "way"), CASES, ids=lambda x: getattr(x, "name", x))


@cache
def function(framework, way, max_norm, options):
    """Return a function of zeros and rows that sums these clipped: the same one again, so that JAX compiles it once."""
    if way == "per_example_clip":
        return lambda _, grads: gradclip.per_example_clip(grads, max_norm, **dict(options))[0]
    size = 1000 if way.endswith("microbatches") else None
    loss = lambda p, x: framework.sum(p * x)
    sum_of = gradclip.clipped_grad(loss, max_norm, microbatch_size=size, **dict(options))
    return lambda zeros, grads: sum_of(zeros, grads)


def clipped_sum(framework, way, grads, max_norm, **options):
    """Return the sum over rows of `grads`, which are the gradients themselves or those of a linear loss."""
    zeros = framework.array(np.zeros(grads.shape[1:]), dtype_name(grads))
    summed = framework.call(function(framework, way, max_norm, tuple(options.items())), zeros, grads)
    return framework.to_numpy(summed)


@everywhere
@pytest.mark.parametrize(("dtype", "element", "max_norm"), [("float16", 1e-4, 1e-4), ("float32", 1e-25, 1e-26)])
def test_squares_that_underflow_are_clipped_all_the_same(framework, way, dtype, element, max_norm):
    """Their sum is 0 in the dtype: with a norm of 0 nothing is clipped, and an example is 41% or 14 times too long."""
    grads = framework.array([[element, -element]], dtype)
    summed = clipped_sum(framework, way, grads, max_norm)
    assert summed.dtype == np.float32
    np.testing.assert_allclose(summed, [max_norm / math.sqrt(2.0), -max_norm / math.sqrt(2.0)], rtol=1e-6)
    # What is clipped is at most max_norm; its sum has been rounded to float32.
    assert power_of_norm([summed], 2) <= (Fraction(max_norm) * (1 + Fraction(2) ** -24)) ** 2


@everywhere
def test_one_nan_takes_away_its_own_example_alone(framework, way):
    grads = framework.array([[3.0, 4.0], [np.nan, 1.0], [0.25, 0.5]])
    np.testing.assert_allclose(clipped_sum(framework, way, grads, 1.0), [0.85, 1.3], rtol=1e-6)
    alone = framework.array([[np.nan, 1.0]])
    assert clipped_sum(framework, way, alone, 1.0).tolist() == [0.0, 0.0]


@everywhere
def test_a_threshold_below_zero_is_an_error(framework, way):
    with pytest.raises(ValueError, match="must not be negative or NaN, got -1"):
        clipped_sum(framework, way, framework.array([[3.0, 4.0]]), -1.0)


@everywhere
def test_one_of_many_alike_in_bfloat16_moves_the_sum_by_the_threshold(framework, way):
    """16 ones have norm 4, and clipped to 1 are 0.25 each: 4,096 rows add up to 1,024, where bfloat16 counts by 8."""
    ones = np.ones((4096, 16))
    whole, less = (clipped_sum(framework, way, framework.array(rows, "bfloat16"), 1.0) for rows in (ones, ones[1:]))
    assert whole.dtype == np.float32
    np.testing.assert_allclose(whole, 1024.0, rtol=1e-6)
    np.testing.assert_allclose(less, 1023.75, rtol=1e-6)
    promised = gradclip.clipped_sum_sensitivity(
        1.0, batch_size=4096, layout=gradclip.SumLayout(elements=16, partial_sums=5)
    )
    moved = power_of_norm([np.float64(whole) - np.float64(less)], 2)
    assert 0.999**2 < moved <= Fraction(promised.total) ** 2


@everywhere
def test_on_a_fine_grid_by_hand(framework, way):
    """Two elements leave sqrt(2) / 2 of 10**9 steps for rounding: 599999999.58 and 799999999.43 are rounded."""
    with jax.enable_x64(True):
        for grads in ([[3.0, 4.0]], [[3e7, 4e7]]):
            summed = clipped_sum(framework, way, framework.array(grads), 5.0, grid=10**9)
            assert summed.dtype == np.int64
            assert summed.tolist() == [600_000_000, 799_999_999]


def fine_examples():
    return np.random.default_rng(0).normal(size=(60, 40)).astype(np.float32)


@everywhere
def test_on_a_fine_grid_no_float32_gradient_exceeds_the_threshold(framework, way):
    grid, grads = 10**9, fine_examples()[:20]
    with jax.enable_x64(True):
        whole = clipped_sum(framework, way, framework.array(grads), 1.0, grid=grid)
        alone = [clipped_sum(framework, way, framework.array(row[None]), 1.0, grid=grid) for row in grads]
    assert (np.sum(alone, axis=0) == whole).all()
    assert all((1 - 1e-6) * grid**2 < sum(int(v) ** 2 for v in row) <= grid**2 for row in alone)


def test_rounding_what_was_clipped_in_float32_exceeds_it_in_half_of_the_cases():
    grid, broken = 10**9, 0
    for row in fine_examples():
        clipped = row * np.minimum(np.float32(1.0), np.float32(1.0) / np.linalg.norm(row))
        steps = np.round(clipped * np.float32(grid)).astype(np.int64)
        broken += sum(int(v) ** 2 for v in steps) > grid**2
    assert 20 < broken < 40
