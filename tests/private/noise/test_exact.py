"""How much noise integers need, in exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest

from gradclip._src.private.noise.add import checked_multiplier
from gradclip._src.private.noise.exact import (
    FEWEST_STEPS,
    noise_on_floats,
    noise_on_integers,
    to_floats,
    to_integers,
)
from gradclip._src.private.sums.rounding import root_up
from subnormals import flushing

TOTALS = (1.0, 0.1, 3.0, math.nextafter(1.0, 2.0), 2.0**-700, 1e30)
ELEMENTS = (1, 2, 3, 4, 1000, 10**6, 2**30)


@pytest.mark.parametrize("in_steps", [1024.0, 1000.1, float(2**52), root_up(Fraction(2 * 2**40))])
@pytest.mark.parametrize("multiplier", [1.0, 0.1, 1.1, math.nextafter(0.3, 1.0)])
def test_integers_get_at_least_the_noise_asked_for(in_steps, multiplier):
    needed = Fraction(multiplier) * Fraction(in_steps)
    found = Fraction(noise_on_integers(in_steps, multiplier))
    assert needed <= found <= needed * (1 + Fraction(2) ** -52)


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("multiplier", [1.0, 0.7])
def test_floats_get_the_noise_of_what_rounding_adds(total, elements, multiplier):
    exponent, scale = noise_on_floats(total, elements, multiplier)
    step, m = Fraction(2) ** exponent, Fraction(multiplier)
    plain = m * Fraction(total) / step
    assert Fraction(scale) >= plain
    assert (Fraction(scale) - plain) ** 2 >= m**2 * elements  # scale >= m * (total / s + sqrt(D))
    assert Fraction(scale) <= plain * (1 + Fraction(2) ** -15)
    # The step is the largest power of two with sqrt(D) * s <= total / 2**16.
    assert elements * step**2 <= (Fraction(total) / 2**16) ** 2
    assert elements * (2 * step) ** 2 * (1 + Fraction(2) ** -50) > (Fraction(total) / 2**16) ** 2
    assert scale >= multiplier * 2**16


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rounding_moves_neighbors_apart_by_at_most_a_step_for_each_element(dtype):
    rng = np.random.default_rng(0)
    for trial in range(50):
        elements = int(rng.integers(1, 30))
        x = (rng.normal(size=elements) * 8).astype(dtype)
        # Half a step apart from an integer, where rounding moves most.
        x[::2] = np.floor(x[::2]) + dtype(0.5)
        y = (x + rng.integers(-2, 3, elements).astype(dtype) / 2).astype(dtype)
        exponent = -int(trial % 3)
        a, b = (to_integers(z.astype(np.float64), exponent).tolist() for z in (x, y))
        moved = sum((p - q) ** 2 for p, q in zip(a, b, strict=True))
        before = sum(((Fraction(float(p)) - Fraction(float(q))) * 2**-exponent) ** 2 for p, q in zip(x, y, strict=True))
        most = Fraction(root_up(before)) + Fraction(root_up(Fraction(elements)))
        assert moved <= most**2


def test_rounding_can_move_neighbors_apart_by_a_whole_step():
    # One step apart before, two steps after: the bound is reached.
    assert to_integers(np.array([0.5, 1.5]), 0).tolist() == [0, 2]


def test_integers_are_the_nearest_multiples():
    for exponent in (-20, 0, 3):
        numbers = np.array([0.3, -7.75, 1e6, -12345.678])
        for x, k in zip(numbers, to_integers(numbers, exponent).tolist(), strict=True):
            assert abs(Fraction(float(x)) - k * Fraction(2) ** exponent) <= Fraction(2) ** exponent / 2


def test_what_is_not_a_number_or_too_large_has_an_integer():
    given = np.array([np.nan, np.inf, -np.inf, 1e300, -1e300, 2.0**62, -0.0, 5e-324])
    assert to_integers(given, 0).tolist() == [0, 2**62, -(2**62), 2**62, -(2**62), 2**62, 0, 0]
    assert to_integers(np.array([1e300]), -900).tolist() == [2**62]
    assert to_integers(np.array([], np.float64), 0).dtype == np.int64


def test_floats_come_back_as_multiples():
    assert to_floats(np.array([3, -(2**62)], np.int64), -2).tolist() == [0.75, -(2.0**60)]


def test_flush_mode_changes_nothing():
    tiny = np.array([2.0**-140], np.float32)
    with flushing():
        assert (tiny * np.float32(2)).tolist() == [0]
        integers = to_integers(tiny, -140)
        found = to_floats(integers, -140, np.float32)
    assert integers.tolist() == [1]
    assert found.tolist() == tiny.tolist()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: noise_on_integers(10.0, 1.0),
            r"10 steps is too coarse: the accounting needs 64. Pass .* least 7 times",
        ),
        (lambda: noise_on_integers(2.0**62, 1.0), "would not fit int64"),
        (lambda: noise_on_floats(1.0, 1, 1e15), "would not fit int64"),
        (lambda: noise_on_floats(1.0, 1, 2.0**-11), "noise_multiplier must be larger: .* has 32.* steps, and the acc"),
        (lambda: noise_on_floats(1e-300, 1, 1.0), r"must be from 2\*\*-800 to 2\*\*800"),
        (lambda: checked_multiplier(0.0), "noise_multiplier must be positive and finite, got 0.0"),
        (lambda: checked_multiplier(-1), "noise_multiplier must be positive and finite, got -1"),
        (lambda: checked_multiplier(math.nan), "noise_multiplier must be positive and finite, got nan"),
        (lambda: checked_multiplier(math.inf), "noise_multiplier must be positive and finite, got inf"),
    ],
)
def test_settings_without_a_proof_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_the_fewest_steps():
    assert noise_on_integers(float(FEWEST_STEPS), 1.0) == 64.0
    assert checked_multiplier(np.float32(1.5)) == 1.5
    with pytest.raises(TypeError, match="noise_multiplier must be a number, got '1'"):
        checked_multiplier("1")
