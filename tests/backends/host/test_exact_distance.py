"""How far two sums are apart, beside rational numbers."""

from fractions import Fraction

import numpy as np
import pytest

from gradclip import check_sensitivity
from gradclip._src.backends.host.exact import squared_distance


@pytest.mark.parametrize("excess", [0.0, 2.0**-52])
def test_distances_are_exact(excess):
    # Each example adds 1, but one adds 2**-52 more: too much by exactly that.
    def function(grads):
        large = np.abs(grads).max(axis=1) > 1e3
        return np.array([np.sum(large) * (1.0 + excess)])

    report = check_sensitivity(function, np.ones((2, 3)), sensitivity=1.0)
    assert report.worst.distance == (1.0 + excess)
    assert report.holds == (excess == 0)


def test_integers_beyond_float64_are_exact():
    function = lambda grads: np.array([2**60 + len(grads)])
    report = check_sensitivity(function, np.ones((3, 1)), sensitivity=1.0)
    assert report.worst.distance == 1.0
    assert report.holds


@pytest.mark.parametrize("low", [-1074, -40])
def test_squared_distance_is_exact(low):
    rng = np.random.default_rng(0)
    for _ in range(50):
        x, y = (rng.normal(size=9) * 2.0 ** rng.integers(low, 900, size=9) for _ in range(2))
        y = np.where(rng.random(9) < 0.3, x, y)
        x[0] = 0.0
        expected = sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(x.tolist(), y.tolist(), strict=True))
        assert squared_distance([x], [y]) == expected
    assert squared_distance([x], [x.copy()]) == 0
