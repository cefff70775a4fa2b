"""Whole steps in exact arithmetic: what each example adds, what the sum rounds, and how far one example moves it."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from exact_steps import EXAMPLES, STEPS, Recorded, arguments, batch, fractions
from factors import DTYPES, KINDS

MAX_NORM = 1.0


def step_of(name, **settings):
    return gradclip.clipped_grad(
        STEPS[name][1],
        **{"max_norm": MAX_NORM, "batch_argnums": (1, 2, 3, 4), "keep_batch_dim": False, "method": "ghost"} | settings,
        pad_to=EXAMPLES,
    )


def square(x):
    return sum(v * v for v in np.ravel(x))


def without(place):
    return np.arange(EXAMPLES) != place


@pytest.mark.every_case
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_step_keeps_its_bound_and_its_rounding(framework, name, dtype, monkeypatch):
    recorded = Recorded(monkeypatch)
    clipped = step_of(name)
    with jax.enable_x64(dtype == "float64"):
        for seed, kind in enumerate(KINDS):
            args = arguments(framework, name, *batch(kind, dtype, seed), dtype=dtype)
            whole = fractions(clipped(*args, mask=np.ones(EXAMPLES, bool)))
            weights, gradients = recorded.weights(), recorded.gradients(STEPS[name][0])
            added = [w * g for w, g in zip(weights, gradients, strict=True)]
            assert all(square(x) <= Fraction(MAX_NORM) ** 2 for x in added)
            promise = clipped.sensitivity()
            assert promise.bound == MAX_NORM
            assert square(whole - sum(added)) <= Fraction(promise.rounding) ** 2
            if kind in ("ordinary", "huge"):
                assert all(w == 1 or square(x) >= Fraction(999, 1000) for w, x in zip(weights, added, strict=True))
            less = fractions(clipped(*args, mask=without(3 * seed % EXAMPLES)))
            assert square(whole - less) <= Fraction(promise.total) ** 2


def examples(framework, dtype):
    library = torch if framework == "torch" else jnp
    return library.ones((4, 2, 3), dtype=getattr(library, dtype))


@pytest.mark.parametrize(("framework", "dtype"), [("jax", "float32"), ("torch", "float16"), ("torch", "float64")])
def test_the_self_test_of_a_step_measures_its_factors(framework, dtype, monkeypatch):
    recorded = Recorded(monkeypatch)
    clipped = step_of("linear")
    report = gradclip.check_sensitivity(
        clipped, examples(framework, dtype), sensitivity=clipped.sensitivity(), trials=1
    )
    assert report.holds, report
    assert recorded.parts is not None
    # The examples were not left out.
    assert report.worst.distance > 0.99


def test_the_self_test_finds_weights_that_are_too_large(monkeypatch):
    Recorded(monkeypatch).times = 1.01
    clipped = step_of("linear")
    assert not gradclip.check_sensitivity(
        clipped, examples("torch", "float32"), sensitivity=clipped.sensitivity(), trials=1
    ).holds
