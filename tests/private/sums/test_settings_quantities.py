"""Numbers in promises: NumPy's and frameworks' scalars count, and what is no number, or too large, is said."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from tests.support.sum_layouts import with_layout

from gradclip import Sensitivity, SumLayout, clipped_sum_sensitivity
from gradclip._src.private.sums.settings import as_number

HUGE = [10**400, -(10**400), 10**5000, Fraction(10) ** 400]
NO_NUMBERS = ["1", None, True, np.bool_(True), 1j, np.complex64(1), [1.0], np.array([1.5]), torch.ones(1)]
SCALARS = [
    np.float64(1.5),
    np.float32(1.5),
    np.float16(1.5),
    ml_dtypes.bfloat16(1.5),
    np.longdouble(1.5),
    np.array(1.5),
    jnp.float32(1.5),
    torch.tensor(1.5),
    Fraction(3, 2),
]


def promise(bound, **settings):
    return Sensitivity(bound, "example", relation="zero_out", **settings)


def by_type(value):
    return f"{type(value).__module__}.{type(value).__name__}"


@pytest.mark.parametrize("scalar", SCALARS, ids=by_type)
def test_scalars_are_numbers(scalar):
    found = promise(scalar, denominator=scalar, rounding=scalar)
    assert found == promise(1.5, denominator=1.5, rounding=1.5)
    assert {type(x) for x in (found.bound, found.denominator, found.rounding)} == {float}
    assert found.noise_std(scalar) == 4.5
    assert str(found) == str(promise(1.5, denominator=1.5, rounding=1.5))
    assert clipped_sum_sensitivity(scalar, normalize_by=scalar, batch_size=2).bound == 1.0


@pytest.mark.parametrize("count", [np.int64(8), np.int8(8), np.uint64(8), np.array(8), torch.tensor(8)], ids=by_type)
def test_counts_of_numpy(count):
    found = clipped_sum_sensitivity(
        1.0,
        batch_size=count,
        layout=SumLayout(partial_sums=count, elements=count, microbatches=count, partial_sums_in="float16"),
    )
    assert found == clipped_sum_sensitivity(
        1.0, batch_size=8, layout=SumLayout(partial_sums=8, elements=8, microbatches=8, partial_sums_in="float16")
    )
    assert clipped_sum_sensitivity(1.0, grid=np.int64(2**20)).rounding == 0.0
    assert promise(np.int64(2)).noise_std(np.int64(3)) == 6.0


def test_what_float64_cannot_hold_is_rounded_up():
    assert promise(2**53 + 1).bound == 2.0**53 + 2
    assert Fraction(promise(Fraction(1, 3)).bound) > Fraction(1, 3)
    third = np.longdouble(1) / 3
    assert Fraction(promise(third).bound) >= Fraction(*third.as_integer_ratio())
    assert as_number("x", Fraction(-1, 3)) > Fraction(-1, 3)


@pytest.mark.parametrize("value", HUGE, ids=by_type)
def test_huge_numbers(value):
    for call in (
        lambda: promise(value),
        lambda: promise(1.0, rounding=value),
        lambda: promise(1.0, denominator=value),
        lambda: promise(1.0).noise_std(value),
        lambda: clipped_sum_sensitivity(value, batch_size=2),
        lambda: clipped_sum_sensitivity([1.0, value]),
        lambda: clipped_sum_sensitivity(1.0, normalize_by=value),
    ):
        with pytest.raises(
            ValueError, match=r"must be a number within float64's range, got an (integer of|object of type Fraction)"
        ):
            call()


@pytest.mark.parametrize("name", ["batch_size", "partial_sums", "elements", "microbatches", "grid"])
@pytest.mark.parametrize(
    "value", [10**400, 1 << 20000, 2**63, 0, -1, 1.5, True, "1", [1], math.inf, np.float64(2)], ids=by_type
)
def test_counts_out_of_range(name, value):
    wrong = (ValueError, TypeError) if name == "elements" else ValueError  # anything may be a tree of arrays
    with pytest.raises(wrong, match=f"{name} must be a (whole )?number"):
        clipped_sum_sensitivity(1.0, **with_layout({name: value}))


@pytest.mark.parametrize("value", NO_NUMBERS, ids=by_type)
def test_what_is_no_number(value):
    for name, call in {
        "bound": lambda: promise(value),
        "rounding": lambda: promise(1.0, rounding=value),
        "noise_multiplier": lambda: promise(1.0).noise_std(value),
    }.items():
        with pytest.raises(TypeError, match=f"{name} must be a number, got"):
            call()
    if value is not None and not isinstance(value, list):
        with pytest.raises(TypeError, match="max_norm must be a number, got"):
            clipped_sum_sensitivity(value)


def test_noise_and_sensitivities_beyond_the_range():
    with pytest.raises(ValueError, match=r"beyond float64's range\. Lower max_norm or noise_multiplier"):
        promise(1e300).noise_std(1e300)
    with pytest.raises(ValueError, match=r"the sensitivity is beyond float64's range\. Lower max_norm, got"):
        clipped_sum_sensitivity(1.7e308, "replace_one", sum_dtype="float64")
    with pytest.raises(ValueError, match=r"the sensitivity is beyond float64's range\. Lower max_norm, got"):
        clipped_sum_sensitivity([1.7e308] * 3)


@pytest.mark.parametrize(
    "dtype", ["float16", "int32", "", None, [], 5, np.float16, torch.bfloat16, jnp.int32, "a" * 500]
)
def test_dtypes_of_sums(dtype):
    for name in ("sum_dtype", "summed_in"):
        with pytest.raises(ValueError, match=f"{name} must be float32 or float64, got .{{0,120}}$"):
            clipped_sum_sensitivity(1.0, **with_layout({name: dtype}))


def test_dtypes_of_partial_sums():
    with pytest.raises(ValueError, match="partial_sums_in must be float32, float64, float16 or bfloat16, got 'int8'"):
        SumLayout(partial_sums_in="int8")


@pytest.mark.parametrize("name", ["relation", "rule", "unit"])
@pytest.mark.parametrize("value", [None, 1, ["clip"], np.array(["clip", "x"]), 10**5000], ids=by_type)
def test_names_that_are_no_text(name, value):
    with pytest.raises(ValueError, match=f"{name} must be one of .*, got .{{0,80}}\\.$"):
        clipped_sum_sensitivity(1.0, **{name: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grid": 2**52 + 1}, r"grid must be the number of steps in max_norm, an integer from 1 to 2\*\*52"),
        ({"grid": 2**53}, r"an integer from 1 to 2\*\*52"),
        ({"grid": 16, "to_unit": True}, "to_unit=True does not work with a grid"),
        ({"grid": 16, "max_norm": 0.0}, "with a grid max_norm must be positive and finite"),
        ({"grid": 16, "max_norm": math.inf}, "with a grid max_norm must be positive and finite"),
        ({"grid": 16, "max_norm": {"a": 1.0, "b": 0.0}}, "with a grid max_norm must be positive and finite"),
        ({"grid": 4, "elements": 2**20}, "too coarse for 1048576 elements.* The smallest grid that works is 513"),
        ({"grid": 2**50, "batch_size": 2**13}, "may overflow int64"),
        ({"per_layer": True, "max_norm": [1.0, 2.0]}, "per_layer=True needs one number as max_norm"),
        ({"per_layer": True, "to_unit": True}, "to_unit with per_layer"),
    ],
    ids=str,
)
def test_what_clipping_refuses_is_not_promised(settings, message):
    with pytest.raises(ValueError, match=message):
        clipped_sum_sensitivity(**{"max_norm": 1.0, **with_layout(settings)})


def test_the_largest_grid_is_promised():
    assert clipped_sum_sensitivity(1.0, grid=2**52, batch_size=2**10).total == 1.0


@pytest.mark.parametrize("name", ["max_norm", "normalize_by", "batch_size"])
def test_traced_arrays_are_no_constants(name):
    with pytest.raises(TypeError, match=f"^{name} must be a constant, got a traced array"):
        jax.jit(lambda x: clipped_sum_sensitivity(**{"max_norm": 1.0, name: x}).bound)(2)
