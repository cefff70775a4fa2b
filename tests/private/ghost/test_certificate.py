"""The constants of the proof, and that the floor is needed."""

from fractions import Fraction

import pytest

from gradclip._src.private.ghost.certificate import (
    error_of_square,
    raised_by_floor,
    relative_error,
    rounding_of_sum,
)


def test_the_error_counts_products_and_additions():
    # 784 + 1000 products and T**2 = 1 additions, each 2**-53.
    assert 1801 * 2.0**-53 <= error_of_square(784, 1000, 1) <= 2100 * 2.0**-53
    assert error_of_square(64, 64, 1000) > 10**6 * 2.0**-53
    # The squares of 5000 blocks take as many additions.
    assert error_of_square(2, 2, 1, 5000) >= 5005 * 2.0**-53


def test_no_bound_is_given_for_too_many_terms():
    assert error_of_square(10, 10, 2**15) is not None
    assert error_of_square(10, 10, 2**17) is None


def test_the_floor_is_for_several_terms():
    assert raised_by_floor(1) == 0.0
    assert raised_by_floor(64) == 2.0**-28


@pytest.mark.parametrize("parameters", [1, 100])
def test_the_error_of_a_norm_leaves_room(parameters):
    # The additions, the root, and more than 4 roundings for what follows.
    assert relative_error(parameters) > (parameters + 2 + 4) * 2.0**-53


def test_what_a_sum_rounds():
    assert rounding_of_sum(256, cancels=True) == Fraction(202, 100) * 258 / 2**33
    assert float(256 * rounding_of_sum(256, cancels=True)) == pytest.approx(1.55e-5, rel=0.01)
    assert rounding_of_sum(256, cancels=False) * 2**20 == rounding_of_sum(256, cancels=True)
