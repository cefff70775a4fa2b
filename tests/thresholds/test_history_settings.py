"""What users say of thresholds that follow."""

import math

import numpy as np
import pytest

from gradclip._src.thresholds.history import check_between, check_window


def test_numbers_within_their_range_are_floats():
    assert type(check_between("x", 1, 0.0, 1.0)) is float
    assert check_between("x", np.float32(0.0), 0.0, 1.0) == 0.0


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
def test_others_are_refused(value):
    with pytest.raises(ValueError, match=r"x must be from 0.0 to 1.0, got "):
        check_between("x", value, 0.0, 1.0)


def test_the_low_end_may_be_left_out():
    with pytest.raises(ValueError, match=r"x must be above 0.0 and at most 1.0, got 0"):
        check_between("x", 0, 0.0, 1.0, above_low=True)


def test_windows_are_whole_numbers():
    assert check_window("x", np.int32(3)) == 3
    with pytest.raises(TypeError, match="x must be a whole number, got True of type bool"):
        check_window("x", True)
    with pytest.raises(ValueError, match="x must be from 1 to 32768, got 32769"):
        check_window("x", 32769)
