"""The comparison itself, tried on wrong answers, and the tolerances, worked out by hand."""

import math

import ml_dtypes
import numpy as np
import pytest

from parity_support import (
    SIZES,
    ULP,
    assert_just_below,
    assert_matches,
    gradients,
    plain_sum_ulps,
    reference_clip,
    reference_norm,
    tolerance,
)

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


@pytest.mark.parametrize("dtype", DTYPES)
def test_units_in_the_last_place_pass_and_one_more_does_not(dtype):
    expected, units = np.array([1.0, -1.5]), 4.0 if dtype in ("float32", "complex64") else 2.0
    assert assert_matches(expected * (1 - units * ULP[dtype]), expected, tolerance(dtype), dtype) == units
    with pytest.raises(AssertionError, match="1 of 2 elements, the first "):
        assert_matches(expected - [(units + 1) * ULP[dtype] + 80 * 2.0**-53, 0.0], expected, tolerance(dtype), dtype)


@pytest.mark.parametrize(
    "wrong",
    [[0.0, 0.8], [0.6, -0.8], [0.6, 0.8000005], [0.6, math.nan], [0.6, math.inf], [0.6], [[0.6, 0.8]], [0.6, 0.8, 0.0]],
)
def test_wrong_answers(wrong):
    with pytest.raises(AssertionError):
        assert_matches(np.array(wrong), [0.6, 0.8], tolerance("float32"), "float32")


def test_nan_and_infinity_match_themselves_only():
    values = [math.nan, math.inf, -math.inf, 1.0]
    assert assert_matches(values, values, 0.0, "float64") == 0.0
    for wrong in ([1.0, math.inf, -math.inf, 1.0], [math.nan, math.inf, math.inf, 1.0]):
        with pytest.raises(AssertionError):
            assert_matches(wrong, values, 1.0 - 2.0**-53, "float64")


def test_steps_below_the_normal_range():
    assert_matches([2.0**-23], [0.0], tolerance("float16"), "float16")
    with pytest.raises(AssertionError):
        assert_matches([3 * 2.0**-24], [0.0], tolerance("float16"), "float16")


def test_scale_of_sums_that_cancel():
    assert_matches([1e-7], [0.0], tolerance("float32"), "float32", scale=[1.0])
    with pytest.raises(AssertionError):
        assert_matches([1e-7], [0.0], tolerance("float32"), "float32", scale=[0.1])


def test_complex_numbers_are_compared_part_by_part():
    assert assert_matches([0.6 + 0.8j], [0.6 + 0.8j], 0.0, "complex64") == 0.0
    with pytest.raises(AssertionError):
        assert_matches([0.6 - 0.8j], [0.6 + 0.8j], 1.0, "complex64")


def test_just_below():
    below = [0.6 - 2.0**-24, 0.8]
    assert_just_below(below, [0.6, 0.8], "float32")
    for wrong in ([0.6 + 2.0**-24, 0.8], [0.6 - 2.0**-21, 0.8], [-0.6, 0.8]):
        with pytest.raises(AssertionError):
            assert_just_below(wrong, [0.6, 0.8], "float32")


def test_tolerances():
    assert tolerance("float64") == 2.0**-51 + 65 * 2.0**-53
    assert tolerance("float16") == pytest.approx(2.0**-9, rel=1e-10)
    assert tolerance("bfloat16", 10**6) == pytest.approx(2.0**-6, rel=1e-7)
    assert tolerance("float32", peer_ulps=2.0, shift=1e-6) == pytest.approx(6 * 2.0**-23 + 1e-6, rel=1e-7)
    assert tolerance("complex64") == tolerance("float32")
    assert plain_sum_ulps(64) == 4.0
    assert plain_sum_ulps(64, 0.5) == 8.0
    assert plain_sum_ulps(64, math.inf) == 0.0


@pytest.mark.parametrize(("ord", "norm"), [(1, 19.0), (2, 13.0), (math.inf, 12.0), (-math.inf, 3.0)])
def test_reference(ord, norm):
    leaves = [np.array([3.0]), np.array([[-4.0, 12.0]])]
    assert reference_norm(leaves, ord) == norm
    clipped = reference_clip(leaves, norm / 2, ord)
    assert [x.tolist() for x in clipped] == [[1.5], [[-2.0, 6.0]]]
    assert reference_clip(leaves, norm, ord)[0].tolist() == [3.0]


def test_gradients():
    small, large = gradients(np.float32), gradients(np.float32, large=True)
    assert tuple(x.size for name, x in {**small, **large}.items() if name.startswith("size")) == SIZES
    assert small["scalar"].shape == ()
    assert not small["strided"].flags.c_contiguous
    assert not small["transposed"].flags.c_contiguous
    assert all(np.array_equal(x, gradients(np.float32)[name]) for name, x in small.items())
    assert all(x.dtype == np.complex64 and np.abs(x.imag).sum() for x in gradients(np.complex64).values() if x.size)
