"""What rounding adds to a sum, beside exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
from tests.support.sum_layouts import with_layout

import gradclip
from gradclip._src.private.sums.sensitivity import clipped_sum_sensitivity, root_up, rounded_up


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1.0, 1e150, 1e300])
def test_roots_of_sums_of_squares_are_rounded_up_and_no_further(scale):
    rng = np.random.default_rng(0)
    for _ in range(100):
        thresholds = (rng.uniform(size=int(rng.integers(2, 9))) * scale).tolist()
        total = sum(Fraction(c) ** 2 for c in thresholds)
        bound = clipped_sum_sensitivity(thresholds).bound
        assert Fraction(math.nextafter(bound, 0)) ** 2 < total <= Fraction(bound) ** 2


def test_quotients_are_rounded_up_and_no_further():
    third = clipped_sum_sensitivity(1.0, normalize_by=3.0).bound
    assert Fraction(math.nextafter(third, 0)) < Fraction(1, 3) <= Fraction(third)
    assert rounded_up(Fraction(10) ** 400) == math.inf
    assert root_up(Fraction(9, 4)) == 1.5
    assert root_up(Fraction(0)) == 0.0


def rounding(max_norm=1.0, batch_size=256, **settings):
    return clipped_sum_sensitivity(max_norm, batch_size=batch_size, **with_layout(settings)).rounding


def exact_errors(sums, terms):
    """Return the exact distance between computed sums and those of the terms, axis 0."""
    exact = [sum(map(Fraction, column)) for column in terms.T.tolist()]
    return root_up(sum((Fraction(float(s)) - e) ** 2 for s, e in zip(sums, exact, strict=True)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["float64", "float32 out", "float32 in", "microbatches"])
def test_rounding_errors_of_sums_stay_within_the_bound(seed, kind):
    rng = np.random.default_rng(seed)
    count = 100
    terms = rng.normal(size=(count, 3)) + (5.0 if seed % 2 else 0.0)
    terms /= np.linalg.norm(terms, axis=1, keepdims=True) * (1 + 1e-12)
    if kind == "float32 in":
        terms = np.float64(np.float32(terms * (1 - 2.0**-23)))
        found, settings = np.add.accumulate(np.float32(terms))[-1], {"summed_in": "float32"}
    elif kind == "microbatches":
        found = np.add.accumulate(np.float32([part.sum(axis=0) for part in np.split(terms, 10)]))[-1]
        settings = {"partial_sums": 10}
    else:
        found = terms.sum(axis=0).astype(kind[:7])
        settings = {"sum_dtype": kind[:7]}
    error = exact_errors(found, terms)
    allowed = rounding(batch_size=count, elements=3, **settings) / 2
    assert 0 < error <= allowed


def test_rounding_is_needed_and_at_most_twice_what_is_needed():
    # 128 + 1.001 * 2**-17 rounds up to 128 + 2**-16, and 127 + 1.001 * 2**-17 down to 127 + 2**-17.
    grads = np.float32([[1.0]] * 128 + [[1.001 * 2.0**-17]])
    with_all, without_one = (gradclip.per_example_clip(part, 1.0)[0][0] for part in (grads, grads[1:]))
    moved = Fraction(float(with_all)) - Fraction(float(without_one))
    assert moved == 1 + Fraction(2) ** -17
    promised = clipped_sum_sensitivity(1.0, batch_size=129, layout=gradclip.SumLayout(elements=1))
    assert promised.bound < moved <= promised.total
    assert promised.rounding < 2.1 * 2.0**-17
