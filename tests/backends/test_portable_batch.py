"""Sums over examples in the terms of the array API standard: by hand."""

import math

import numpy as np

from gradclip._src.core.arrays import Arrays
from gradclip._src.core.rules import Coefficient, Factors
from plain_backend import Plain


def half_of_the_second_and_none_of_the_third():
    factors = Factors(np.array([9.0, 0.5, 1.0]))
    return Coefficient(np.array([True, False, False]), np.array([False, False, True]), factors, factors)


def test_each_example_times_its_own_coefficient():
    rows = Arrays([np.float32([[1.0, 2.0], [4.0, -8.0], [math.nan, math.inf]])])
    assert Plain().weighted_sums(rows, half_of_the_second_and_none_of_the_third())[0].tolist() == [3.0, -2.0]


def test_rounded_to_integers_each():
    factors = Factors(np.array([1.5, 0.3]))
    coefficient = Coefficient(np.array([False, False]), np.array([False, False]), factors, factors)
    assert Plain().rounded_sum(np.array([[1.0], [2.0]]), coefficient).tolist() == [2 + 1]


def test_what_is_not_finite_becomes_zero():
    assert Plain().zeroed(Arrays([np.array([[1.0, math.nan], [-math.inf, 2.0]])]))[0].tolist() == [
        [1, 0],
        [0, 2],
    ]
