"""Sums that the kernels make: of squares that are rounded or overflow, and of each array beside that of all."""

import math

import numpy as np
import pytest

import gradclip
from gradclip._src.backends.host.arrays import HostArray
from gradclip._src.backends.host.backend import HOST
from gradclip._src.core.layouts import TREE
from gradclip._src.native import HALF_SQUARES_ERROR
from host_arrays import (
    host_array,
    known,
    number,
    random_array,
    with_kernels,
)


def test_squares_that_overflow_are_not_counted_as_infinite():
    total, nonfinite = known([host_array(np.full(20, 1e200), "float64")]).sum(2.0, 1.0, True, 1)
    assert (total, nonfinite) == (math.inf, 0)
    assert gradclip.global_norm(np.full(4, 1e200)) == 2e200
    assert gradclip.global_norm(np.full(4, 1e-200)) == 2e-200


def test_squares_of_half_types_may_be_rounded_three_times_in_float32():
    x = with_kernels([random_array("float16", 4096)])
    exact = math.fsum(number(x[0]).astype(np.float64) ** 2)
    error = abs(HOST.power_sum(x, 2.0, TREE) / exact - 1)
    assert 2.0**-40 < error <= HALF_SQUARES_ERROR < HOST.sum_error(4096, x, 2.0, TREE)
    assert HOST.sum_error(4096, x, 1.0, TREE) < 1e-13


def test_beside_a_wider_leaf_squares_of_half_types_are_added_in_float64():
    half, double = random_array("float16", 4096), random_array("float64", 7)
    for others in ([double], [HostArray(np.repeat(double.data, 2)[::2], "float64")]):
        x = with_kernels([half, *others])
        exact = math.fsum(np.concatenate([number(a).astype(np.float64) ** 2 for a in x]))
        assert HOST.power_sum(x, 2.0, TREE) == pytest.approx(exact, rel=1e-14)
        assert HOST.sum_error(4103, x, 2.0, TREE) < 1e-12


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_sums_of_each_come_with_the_sum_of_all_to_the_same_bits(p):
    random = np.random.default_rng(5)
    sizes = (3, 0, 70_000, 200_000, 17)
    arrays = known([host_array(random.standard_normal(size), "float32") for size in sizes])
    for threads in (1, 2):
        *each, total = arrays.sums_of_each(p, False, threads)
        assert total == arrays.sum(p, 1.0, False, threads)[0]
        assert each == arrays.group_sums(range(5), 5, p, False, threads)


def test_sums_of_each_complex_array_are_of_both_parts():
    arrays = known([host_array(np.array([3 + 4j]), "complex64"), host_array(np.array([12j, 0]), "complex64")])
    assert arrays.sums_of_each(2.0, False, 1) == [25.0, 144.0, 169.0]
