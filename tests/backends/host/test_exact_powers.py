"""Exact sums of powers, beside fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest

from gradclip._src.backends.host import exact_powers
from gradclip._src.backends.host.exact_powers import PowerSum, counted, excess_of_powers, joined
from rational import power_of_norm

KINDS = {
    "near": lambda rng, size: rng.normal(size=size),
    "far apart": lambda rng, size: np.ldexp(rng.normal(size=size), rng.integers(-1073, 1023, size=size)),
    "full": lambda rng, size: np.ldexp(2.0**53 - rng.integers(1, 9, size=size), rng.integers(-9, 9, size=size)),
    "subnormal": lambda rng, size: rng.integers(-3, 4, size=size) * 5e-324,
    "float32": lambda rng, size: rng.normal(size=size).astype(np.float32).astype(np.float64),
    "signs": lambda rng, size: rng.choice([-0.1, 0.0, 0.1], size=size),
}


def total(chunks, power):
    found = PowerSum(power)
    found.add(chunks)
    return found.total()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("power", [3, 4, 5, 6, 7, 8, 31, 48, 49, 64])
def test_sums_equal_those_of_fractions(power, kind):
    rng = np.random.default_rng(power)
    for size in (1, 2, 50):
        x, y = KINDS[kind](rng, size), KINDS[kind](rng, 3)
        assert total([x, y], power) == power_of_norm([x, y], power)


@pytest.mark.parametrize("size", [8191, 8193, 40_000])
def test_many_numbers(size):
    x = np.random.default_rng(size).choice(KINDS["far apart"](np.random.default_rng(1), 500), size)
    values, counts = np.unique(np.abs(x), return_counts=True)
    wanted = sum(int(count) * Fraction(float(v)) ** 5 for v, count in zip(values, counts, strict=True))
    assert total([x], 5) == wanted
    assert total(np.split(x, [1, 2, 700]), 5) == wanted


def test_the_largest_sums_of_digits_fit():
    whole = 2.0**53 - 1
    many = np.full(1 << 15, whole)
    assert total([many] * 8, 48) == 2**18 * Fraction(whole) ** 48
    assert total([np.full(3, 1.7e308)], 8) == 3 * Fraction(1.7e308) ** 8


def test_nothing_adds_nothing():
    assert total([], 3) == total([np.zeros(5)], 3) == total([np.zeros(0)], 64) == 0


def test_magnitudes_are_counted():
    x = np.array([2.0, -2.0, 0.0, 1.0, 3.0, -0.0, 7.0, 5.0, 6.0, -5.0])
    found = dict(zip(*(part.tolist() for part in counted(x)), strict=True))
    assert found == {2.0: 2, 1.0: 1, 3.0: 1, 7.0: 1, 5.0: 2, 6.0: 1}


def test_small_arrays_are_joined():
    sizes = [3, 9000, 4000, 4000, 4000, 0, 1]
    found = list(joined(np.full(size, float(place)) for place, size in enumerate(sizes)))
    assert [x.size for x in found] == [9003, 12_000, 1]
    assert np.array_equal(np.concatenate(found), np.repeat(np.arange(7.0), sizes))


@pytest.mark.parametrize("power", [3, 7, 64])
def test_pairs_decide_unless_the_norm_is_within_their_error(power):
    x = np.random.default_rng(power).normal(size=50)
    near = Fraction(float(power_of_norm([x], power)) ** (1 / power))
    exponent = math.frexp(near)[1]
    found = excess_of_powers([x], power, near)
    wanted = (power_of_norm([x], power) - near**power) / Fraction(2) ** (exponent * power)
    assert abs(found - wanted) < Fraction(exact_powers._PAIRS_ERROR)
    assert excess_of_powers([np.array([1.0])], power, 1.0) is None
    assert excess_of_powers([x], 257, near) is None
