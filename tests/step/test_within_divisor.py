import math
from fractions import Fraction

import numpy as np
import pytest

from gradclip._src.backends.host.backend import HOST
from gradclip._src.core.rules import Coefficient, Factors
from gradclip._src.step.within import checked, divisor, threshold_of_scaled


def coefficient(first, second=None, *, keep=False):
    return Coefficient(np.bool_(keep), np.False_, Factors(np.float64(first), second), Factors(np.float64(first)))


def test_what_is_kept_is_divided_as_before():
    assert divisor(HOST, coefficient(0.5, keep=True), np.float64(3.0)) == 3.0


@pytest.mark.parametrize("given", [1.0, 65536.0, float(np.float32(1.3))])
def test_quotients_are_no_larger_than_products(given):
    rng = np.random.default_rng(0)
    for c, x in zip(10.0 ** rng.uniform(-20, 0, 3000), rng.uniform(1.0, 2.0, 3000).astype(np.float32), strict=True):
        single = np.float32(divisor(HOST, coefficient(c), np.float64(given)))
        exact = Fraction(c) * Fraction(float(x)) / Fraction(given)
        assert exact * (1 - Fraction(1, 2**22)) <= Fraction(float(x / single)) <= exact


@pytest.mark.parametrize("first", [0.0, 1e-39])
def test_a_coefficient_beyond_float32_leaves_nothing(first):
    assert divisor(HOST, coefficient(first), np.float64(1.0)) == math.inf


def test_both_factors_count():
    assert divisor(HOST, coefficient(0.5, np.float64(0.25)), np.float64(1.0)) == pytest.approx(8.0, rel=1e-6)


def test_nan_stays():
    assert math.isnan(divisor(HOST, coefficient(math.nan), np.float64(1.0)))


def test_the_threshold_of_scaled_gradients():
    assert threshold_of_scaled(HOST, 5.0, np.float64(1024.0)) == 5120.0
    lowered = threshold_of_scaled(HOST, 5.0, np.float64(1000.0))
    assert 5000.0 * (1 - 2.0**-21) < lowered < 5000.0 * (1 - 2.0**-23)


@pytest.mark.parametrize("max_norm", [0.0, 2.0**-50, 1.0, 2.0**100, math.inf])
def test_thresholds_in_range(max_norm):
    assert checked(max_norm) == max_norm


@pytest.mark.parametrize("max_norm", [1e-300, 2.0**-51, 2.0**101])
def test_thresholds_out_of_range(max_norm):
    with pytest.raises(ValueError, match="within a fused step"):
        checked(max_norm)
