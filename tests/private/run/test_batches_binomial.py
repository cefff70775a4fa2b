"""Tails of the binomial distribution, against exact fractions and SciPy."""

import math
from fractions import Fraction

import pytest
from scipy import stats

from gradclip._src.private.run.batches import smallest_size, tail_above


def exact_tail(trials, chance, most):
    q = Fraction(chance)
    terms = (math.comb(trials, k) * q**k * (1 - q) ** (trials - k) for k in range(most + 1, trials + 1))
    return sum(terms, Fraction(0))


@pytest.mark.parametrize(
    ("trials", "chance", "most"),
    [
        (1, 0.5, 0),
        (2, 0.5, 1),
        (7, 0.25, 0),
        (30, 2**-53, 3),
        (30, 1 - 2**-53, 3),
        (30, 1 - 2**-53, 29),
        (64, 0.375, 24),
        (200, 3 * 2**-7, 40),
        (200, 0.9, 10),
        (300, 0.1, 150),
    ],
)
def test_bounds_the_exact_tail_from_above_and_closely(trials, chance, most):
    chance = math.floor(Fraction(chance) * 2**53) / 2**53
    exact, found = exact_tail(trials, chance, most), Fraction(tail_above(trials, chance, most))
    assert exact <= found <= exact * (1 + Fraction(2) ** -51)


@pytest.mark.parametrize(
    ("trials", "chance", "most"), [(60_001, 256 / 60_000, 300), (10**6, 0.001, 1200), (999, 0.5, 400)]
)
def test_agrees_with_scipy_for_large_numbers(trials, chance, most):
    chance = math.floor(chance * 2**53) / 2**53
    assert tail_above(trials, chance, most) == pytest.approx(stats.binom.sf(most, trials, chance), rel=1e-9)


def test_the_ends():
    assert tail_above(5, 0.3125, 5) == 0.0
    assert tail_above(5, 0.3125, 9) == 0.0
    assert tail_above(5, 1.0, 4) == 1.0
    assert tail_above(5, 1.0, 5) == 0.0
    # Far below every float64 above zero: the bound is the smallest one.
    assert tail_above(10_000, 2**-53, 5_000) == math.ulp(0.0)


@pytest.mark.parametrize(
    ("trials", "chance", "times"), [(10, 0.5, 1), (201, 3 * 2**-7, 50), (40, 2**-53, 1), (9, 1.0, 4)]
)
@pytest.mark.parametrize("risk", [1e-12, 1e-3, 0.9])
def test_the_smallest_size_fits_and_one_less_does_not(trials, chance, times, risk):
    size = smallest_size(trials, chance, times, risk)
    assert times * exact_tail(trials, chance, size) <= Fraction(risk)
    assert size == 1 or times * exact_tail(trials, chance, size - 1) > Fraction(risk)
