"""Sums that are added up once more, over devices or virtual batches: the promise beside exact rational arithmetic."""

import dataclasses
import math
from fractions import Fraction

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from tests.support.sum_layouts import with_layout

import gradclip
from gradclip import clipped_sum_sensitivity
from gradclip._src.backends.host.exact import squared_distance
from gradclip._src.private.sums.sensitivity import root_up


def dot(w, x):
    return (w * x).sum()


def promise(**settings):
    return clipped_sum_sensitivity(1.0, **with_layout(settings))


def adversarial(parts, direction):
    """Add rows up in their dtype, in the order that errs most in one direction of the first coordinate."""
    rest, total = list(parts), np.zeros_like(parts[0])
    while rest:
        sums = [total + part for part in rest]
        errors = [direction * (float(s[0]) - (float(total[0]) + float(p[0]))) for s, p in zip(sums, rest, strict=True)]
        worst = int(np.argmax(errors))
        total = sums[worst]
        del rest[worst]
    return total


def parts_of(grads, count, rng, dtype):
    """Return clipped sums of the grads, dealt out at random to `count` devices, none of which is empty."""
    where = np.concatenate([np.arange(count), rng.integers(count, size=len(grads) - count)])
    sums = [gradclip.per_example_clip(grads[where == i], 1.0)[0] for i in range(count)]
    return [s.astype(dtype) for s in sums]


def moved(grads, count, rng, dtype=np.float32, divided=1.0):
    """Return how far one example less moves the sum of partial sums, in an order that is chosen against the promise."""
    divisor = np.asarray(divided, dtype)
    up, down = (
        adversarial([part / divisor for part in parts_of(g, count, rng, dtype)], direction)
        for g, direction in ((grads, 1.0), (grads[:-1], -1.0))
    )
    return root_up(squared_distance([np.float64(up)], [np.float64(down)]))


@pytest.mark.parametrize("count", [2, 3, 8, 17, 64])
@pytest.mark.parametrize("divided", [1.0, 3.0, 0.1])
def test_the_promise_holds_in_the_worst_order(count, divided):
    rng, ratios = np.random.default_rng(count), []
    for examples in (count + 1, 3 * count, 130):
        for shift in (0.0, 1.0, 4.0):
            grads = np.float32(rng.normal(size=(max(examples, count + 1), 1 + count % 3)) + shift)
            settings = {"batch_size": len(grads), "normalize_by": divided, "elements": grads.shape[1]}
            promised = promise(partial_sums=count, **settings)
            distance = moved(grads, count, rng, divided=divided)
            assert distance <= promised.total
            ratios.append((distance - promised.bound) / promise(**settings).rounding)
    # What is promised for one sum would be exceeded, so that the number of sums has to be said.
    assert count < 64 or divided > 1 or max(ratios) > 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_partial_sums_that_are_added_in_a_half_type(dtype):
    rng = np.random.default_rng(3)
    made = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    needed = False
    for count in (1, 2, 8, 30):
        grads = np.float32(rng.normal(size=(60, 2)) + 3.0)
        distance = moved(grads, count, rng, made)
        promised = promise(batch_size=60, partial_sums=count, partial_sums_in=dtype)
        assert distance <= promised.total
        needed |= distance > promise(batch_size=60, partial_sums=count).total
    assert needed


def promised_by(clipped, **settings):
    """What a clipped function promises where shapes and places stay, without the words for this condition."""
    found = clipped.sensitivity("zero_out", **with_layout(settings))
    return dataclasses.replace(found, relation="add_or_remove_one", note="", keeps_places=False)


def test_by_hand():
    kwargs = {"batch_size": 256, "elements": 10}
    half = 256 * 2.0**-23  # two sums, each off by half a unit in the last place for a rounding
    assert promise(**kwargs, partial_sums=8).rounding == pytest.approx(8 * half, rel=1e-5)
    assert promise(**kwargs, partial_sums=8, microbatches=4).rounding == pytest.approx(11 * half, rel=1e-5)
    assert promise(**kwargs, partial_sums=8, partial_sums_in="float64").rounding == pytest.approx(half, rel=1e-5)
    assert promise(**kwargs, partial_sums=8, partial_sums_in=torch.float32) == promise(**kwargs, partial_sums=8)
    bfloat16 = promise(**kwargs, partial_sums=8, partial_sums_in=jnp.bfloat16).rounding
    assert bfloat16 == pytest.approx(2 * 256 * (1 / (1 - 2.0**-5) - 1), rel=1e-3)
    assert promise(**kwargs, partial_sums=64, grid=2**20).rounding == 0.0
    assert promise(**kwargs, partial_sums=8, grid=2**20, partial_sums_in="float32").rounding > 7 * half
    # 0.1 is no float32: the constant is rounded, its inverse, and the product.
    assert promise(**kwargs, normalize_by=0.1).rounding == pytest.approx(10 * 4 * half, rel=1e-5)


def test_what_a_clipped_function_is_told():
    clipped = gradclip.clipped_grad(dot, 1.0, microbatch_size=32, method="materialize")
    found = promised_by(clipped, batch_size=256, partial_sums=8, elements=10)
    assert found == promise(batch_size=256, partial_sums=8, microbatches=8, elements=10)
    over_devices = promised_by(gradclip.clipped_grad(dot, 1.0, method="materialize"), batch_size=256, partial_sums=8)
    assert over_devices.total > 1.000244  # one sum alone: 1.0000343
    narrow = promised_by(clipped, batch_size=256, partial_sums=8, partial_sums_in="bfloat16", elements=10)
    assert narrow.rounding > 2 * 256 * 8 * 2.0**-8
    device = promised_by(clipped, batch_size=256, summed_in="float32", elements=10)
    assert device == promise(batch_size=256, summed_in="float32", microbatches=8, elements=10)


EXTREME = [0, -1.0, math.inf, -math.inf, math.nan, 1e-38, 1e-45, 2.0**-127, 1e38, 2.0**127, 10**400, np.float32(1e-38)]


@pytest.mark.parametrize("value", EXTREME, ids=lambda v: str(v)[:12])
def test_constants_that_sums_cannot_be_divided_by(value):
    for call in (
        lambda: gradclip.clipped_grad(dot, 1.0, normalize_by=value),
        lambda: gradclip.clipped_fun(dot, 1.0, normalize_by=value),
        lambda: clipped_sum_sensitivity(1.0, normalize_by=value),
    ):
        with pytest.raises(ValueError, match="normalize_by must be"):
            call()


@pytest.mark.parametrize("value", ["2", True, 1j, None, [1.0]])
def test_constants_that_are_no_numbers(value):
    for call in (gradclip.clipped_grad, gradclip.clipped_fun):
        with pytest.raises(TypeError, match="normalize_by must be a number"):
            call(dot, 1.0, normalize_by=value)
    with pytest.raises(TypeError, match="normalize_by must be a number"):
        clipped_sum_sensitivity(1.0, normalize_by=value)


@pytest.mark.parametrize("value", [2.0**-126, 2.0**126, 1e-37, np.float32(0.1), torch.tensor(4.0), 3])
def test_constants_at_the_ends_divide_as_is_promised(value):
    exact = Fraction(float(value))
    for array in (jnp.asarray, torch.tensor):
        clipped = gradclip.clipped_grad(dot, 0.5, normalize_by=value)
        promised = promised_by(clipped, batch_size=1, elements=1)
        found = Fraction(float(clipped(array([1.0]), array([[3.0]]))[0]))
        assert abs(found - Fraction(1, 2) / exact) <= Fraction(promised.rounding)
        assert found <= Fraction(promised.total)
    assert promised.bound == pytest.approx(0.5 / float(value), rel=1e-15)


def test_float64_divides_by_more():
    clipped = gradclip.clipped_grad(dot, 0.5, normalize_by=1e-300, sum_dtype="float64")
    assert float(clipped(torch.ones(1), torch.ones(1, 1))[0]) == pytest.approx(0.5e300)
    with pytest.raises(ValueError, match="pass sum_dtype='float64'"):
        gradclip.clipped_grad(dot, 0.5, normalize_by=1e-300)
    with pytest.raises(ValueError, match=r"from 2.22507e-308 to"):
        gradclip.clipped_grad(dot, 0.5, normalize_by=1e-310, sum_dtype=torch.float64)
