"""Decisions in exact arithmetic, where the computed norm is within its error of the threshold."""

import math
from fractions import Fraction

import numpy as np
import pytest

from gradclip._src.backends.host import exact
from gradclip._src.backends.host.backend import HOST
from rational import power_of_norm


def decide(values, p, threshold):
    x = np.array(values, np.float64)
    with HOST.precision():
        answers = {
            exact.at_most(HOST, HOST.enter(arrays), p, threshold) for arrays in ([x[:3], x[3:]], [x.repeat(2)[::2]])
        }
    (answer,) = answers
    return answer


def test_a_part_of_an_array_is_decided_alone():
    arrays = HOST.enter([np.array([[3.0, 4.0], [5.0, 1e-9]])])
    with HOST.precision():
        assert HOST.at_most(arrays, 2.0, 5.0, (0, slice(None)))
        assert not HOST.at_most(arrays, 2.0, 5.0, (1, slice(None)))
        assert not HOST.at_most(arrays, 2.0, 5.0)
        blank = HOST.without_nonfinite(HOST.enter([np.array([[3.0, 4.0, np.nan], [5.0, 1.0, np.inf]])]))
        assert HOST.at_most(blank, 2.0, 5.0, (0, slice(None)))
        assert not HOST.at_most(blank, 2.0, 5.0, (1, slice(None)))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_nan_and_infinities_which_another_thread_may_have_written_are_refused(p, wrong):
    for values in ([wrong, 3.0, 4.0, 1.0], [3.0, 4.0, 1.0, wrong]):
        with pytest.raises(RuntimeError, match="another thread has written to it"):
            decide(values, p, 5.0)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 7.0])
@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e-5, 1.0, 1e120, 1e200])
def test_decisions_equal_those_of_fractions(p, scale):
    rng = np.random.default_rng(int(p))
    outcomes = set()
    for _ in range(50):
        x = rng.normal(size=5) * scale
        total = power_of_norm([x], int(p))
        near = scale * float(total / Fraction(scale) ** int(p)) ** (1 / p)
        for threshold in (near, float(np.nextafter(near, 0)), float(np.nextafter(near, math.inf))):
            expected = total <= Fraction(threshold) ** int(p)
            assert decide(x, p, threshold) == expected
            outcomes.add(expected)
    assert outcomes == {True, False}


def test_triples():
    assert decide([3.0, 4.0, 0.0, 0.0], 2.0, 5.0)
    assert not decide([3.0, 4.0, 1e-150, 0.0], 2.0, 5.0)
    assert decide([1e-200, 1e-200, 0.0], 1.0, 2e-200)


def test_what_cannot_be_told_clips():
    assert decide([0.0, 5.0], 2.5, 5.0)
    assert not decide([1.0, 5.0], 2.5, 6.0)
    assert not decide([1.0, 1.0], 1_000_001.0, 1.1)


@pytest.mark.parametrize("size", [1000, 40_000])
@pytest.mark.parametrize("p", [1.0, 2.0])
def test_many_terms(size, p):
    x = np.random.default_rng(size).normal(size=size)
    total = power_of_norm([x], int(p))
    near = math.fsum(np.abs(x)) if p == 1 else math.sqrt(math.fsum(x**2))
    for threshold in (near, float(np.nextafter(near, 0)), float(np.nextafter(near, math.inf))):
        assert decide(x, p, threshold) == (total <= Fraction(threshold) ** int(p))


def test_equality_among_many_terms_is_exact():
    ones = np.ones(40_000)
    assert decide(ones, 2.0, 200.0)
    assert not decide([*ones, 1e-100], 2.0, 200.0)
    assert decide(ones, 1.0, 40_000.0)
    assert not decide([*ones, 1e-300], 1.0, 40_000.0)


def test_magnitudes_that_overflow_when_added():
    assert not decide([1e308, 1e308, 1e308], 1.0, 1.7e308)
    assert decide([8e307, 8e307, 0.0], 1.0, 1.6e308)
