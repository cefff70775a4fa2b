import math
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tests.support.sum_layouts import with_layout

from gradclip._src.private.functions.transforms import clipped_grad
from gradclip._src.private.sums.layout import SumLayout
from gradclip._src.private.sums.sensitivity import Sensitivity, clipped_sum_sensitivity, rounded_up


@pytest.mark.parametrize(
    ("max_norm", "relation", "settings", "bound"),
    [
        (1.5, "add_or_remove_one", {}, 1.5),
        (1.5, "replace_one", {}, 3.0),
        (1.5, "zero_out", {}, 1.5),
        (1.5, "replace_one", {"normalize_by": 8.0}, 0.375),
        (1.5, "zero_out", {"rule": "normalize"}, 1.5),
        (1.5, "zero_out", {"rule": "automatic"}, 1.5),
        (1.5, "zero_out", {"per_layer": True}, 1.5),
        (1.5, "zero_out", {"unit": "group"}, 1.5),
        (1.5, "zero_out", {"to_unit": True}, 1.0),
        (0, "replace_one", {}, 0.0),
        (np.float32(1.5), "zero_out", {}, 1.5),
        (jnp.array(1.5), "zero_out", {}, 1.5),
        (torch.tensor(1.5), "zero_out", {}, 1.5),
        ({"w": 3.0, "b": [4.0, None]}, "zero_out", {}, 5.0),
        ({"w": 3.0, "b": 4.0}, "replace_one", {"normalize_by": 5.0}, 2.0),
        ([7.0, 0.5, 1e300, 0.0], "zero_out", {"to_unit": True}, 2.0),
        (math.inf, "zero_out", {}, math.inf),
        ([3.0, math.inf], "replace_one", {"batch_size": 4}, math.inf),
        (math.inf, "replace_one", {"to_unit": True}, 2.0),
    ],
)
def test_bounds_by_hand(max_norm, relation, settings, bound):
    assert clipped_sum_sensitivity(max_norm, relation, **settings).bound == bound


def test_the_record_says_what_it_is_about():
    mean = clipped_sum_sensitivity(1.0, "replace_one", unit="group", normalize_by=64, batch_size=2)
    assert (mean.unit, mean.relation, mean.denominator, mean.bound) == ("group", "replace_one", 64.0, 2.0**-5)
    assert clipped_sum_sensitivity(1.0).denominator is None
    with pytest.raises(FrozenInstanceError):
        mean.bound = 0.0


def rounding(max_norm=1.0, batch_size=256, **settings):
    return clipped_sum_sensitivity(max_norm, batch_size=batch_size, **with_layout(settings)).rounding


def test_rounding_by_hand():
    # Two sums, each off by half a unit in the last place of 256, which is 2**-16; little else matters.
    assert 2.0**-15 < rounding(elements=10) < 2.0**-15 * (1 + 1e-6)
    assert 2.0**-14 < rounding(elements=10, max_norm=2.0) < 2.0**-14 * (1 + 1e-6)
    assert 2.0**-17 < rounding(elements=10, normalize_by=4.0) < 2.0**-17 * (1 + 1e-6)
    # Dividing by what is no power of two rounds twice more: the inverse, and the product.
    assert 1.0 < rounding(elements=10, normalize_by=3.0) / 2.0**-15 < 1.0 + 1e-5
    # In float64 255 additions, in two sums of norms up to 256.
    additions, norms = 2 * 256 * 255 * 2.0**-53, 2 * 26 * 256 * 2.0**-53
    assert rounding(elements=10, sum_dtype="float64") == pytest.approx(additions + norms, rel=1e-9)
    assert rounding(elements=10, summed_in="float32") == pytest.approx(
        2 * 256 * 255 * 2.0**-24 + 2 * (8 + 16) * 256 * 2.0**-24, rel=1e-4
    )
    assert rounding(elements=10, partial_sums=4) == pytest.approx(4 * 2.0**-15, rel=1e-5)
    # Of examples with 2**26 elements, all other norms may change by 2**-26 of themselves.
    assert rounding() == pytest.approx(2.0**-15 + 256 * 2.0**-26, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float64", np.float64, np.dtype("float64"), jnp.float64, torch.float64])
def test_dtypes_are_named_as_frameworks_name_them(dtype):
    assert rounding(sum_dtype=dtype) == rounding(sum_dtype="float64")


def test_integer_sums_do_not_round():
    assert rounding(grid=2**20) == 0.0
    assert clipped_sum_sensitivity(1.0, grid=2**20, normalize_by=4.0).noise_std(1.0) == 0.25
    assert 0 < rounding(grid=2**20, normalize_by=3.0) < rounding(normalize_by=3.0)


def test_sums_of_integers_say_their_distance_in_steps():
    assert clipped_sum_sensitivity(0.25, grid=2**20).in_steps == 2**20
    assert clipped_sum_sensitivity(0.25, "replace_one", grid=2**20, per_layer=True).in_steps == 2**21
    two = clipped_sum_sensitivity({"w": 3.0, "b": 4.0}, grid=2**20).in_steps
    assert Fraction(math.nextafter(two, 0)) ** 2 < 2 * Fraction(2**40) <= Fraction(two) ** 2
    halves = clipped_sum_sensitivity(
        1.0, grid=2**20, layout=SumLayout(partial_sums=2, partial_sums_in="float32"), batch_size=4
    )
    assert halves.rounding > 0
    for floats in (halves, clipped_sum_sensitivity(1.0), clipped_sum_sensitivity(1.0, grid=2**20, normalize_by=2.0)):
        assert floats.in_steps is None


def test_the_largest_sum_is_told():
    assert clipped_sum_sensitivity(1.0).batch_size is None
    assert clipped_sum_sensitivity(1.0, batch_size=256).batch_size == 256
    assert clipped_sum_sensitivity(1.0, batch_size=256, grid=2**20).batch_size == 256
    assert (
        clipped_grad(lambda w, x: (w * x).sum(), 1.0, pad_to=8).sensitivity(layout=SumLayout(partial_sums=2)).batch_size
        == 16
    )


def test_noise():
    sensitivity = Sensitivity(1.0, "example", relation="add_or_remove_one", rounding=2.0**-60)
    assert sensitivity.total == math.nextafter(1.0, 2.0)
    assert sensitivity.noise_std(0) == 0.0
    assert replace(sensitivity, rounding=0.5).noise_std(1.1) == rounded_up(Fraction(1.1) * Fraction(3, 2))
    for multiplier in np.random.default_rng(0).uniform(0.1, 10, 100):
        assert Fraction(sensitivity.noise_std(multiplier)) >= Fraction(multiplier) * (1 + Fraction(2) ** -60)


def test_unknown_rounding_asks_for_the_batch_size():
    unknown = clipped_sum_sensitivity(1.0)
    assert unknown.bound == 1.0
    assert math.isnan(unknown.rounding)
    with pytest.raises(ValueError, match=r"Pass batch_size=.* To leave the rounding out, use"):
        unknown.noise_std(1.0)
    assert replace(unknown, rounding=0.0).noise_std(1.5) == 1.5
    assert clipped_sum_sensitivity(1.0, batch_size=2).noise_std(1.5) > 1.5


def test_what_nothing_bounds_gets_no_noise():
    with pytest.raises(ValueError, match="max_norm must be finite"):
        clipped_sum_sensitivity(math.inf).noise_std(1.0)


@pytest.mark.parametrize(
    ("sensitivity", "text"),
    [
        (
            Sensitivity(1.0, "example", relation="add_or_remove_one"),
            "sum over examples, add or remove one example: at most 1.0",
        ),
        (
            Sensitivity(0.5, "group", relation="replace_one", denominator=4, rounding=3e-5),
            "sum over groups / 4, replace one group: at most 0.5 (+ 3e-05 rounding)",
        ),
        (
            Sensitivity(2.0, "example", relation="zero_out", rounding=math.nan),
            "sum over examples, zero out one example: at most 2.0 (+ rounding, unknown without batch_size)",
        ),
    ],
)
def test_in_words(sensitivity, text):
    assert str(sensitivity) == text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: clipped_sum_sensitivity(-1.0), "must not be negative or NaN, got -1.0"),
        (lambda: clipped_sum_sensitivity({"w": 1.0, "b": math.nan}), "must not be negative or NaN, got nan"),
        (lambda: clipped_sum_sensitivity(jnp.array(-1.0)), "must not be negative or NaN, got -1.0"),
        (lambda: clipped_sum_sensitivity({}), "max_norm holds no thresholds"),
        (lambda: clipped_sum_sensitivity(1.0, "swap"), "relation must be one of 'add_or_remove_one', .*, got 'swap'"),
        (lambda: clipped_sum_sensitivity(1.0, rule="none"), "rule must be one of 'clip', .*, got 'none'"),
        (lambda: clipped_sum_sensitivity(1.0, unit="user"), "unit must be one of 'example', 'group', got 'user'"),
        (lambda: clipped_sum_sensitivity(1.0, normalize_by=0), "normalize_by must be positive and finite"),
        (lambda: clipped_sum_sensitivity(1.0, normalize_by=math.nan), "normalize_by must be positive and finite"),
        (lambda: clipped_sum_sensitivity(1.0, batch_size=0), "batch_size must be a whole number, 1 or more, got 0"),
        (lambda: clipped_sum_sensitivity(1.0, batch_size=2.5), "batch_size must be a whole number"),
        (lambda: clipped_sum_sensitivity(1.0, grid=0), "grid must be a whole number"),
        (lambda: clipped_sum_sensitivity(1.0, sum_dtype="float16"), "sum_dtype must be float32 or float64"),
        (lambda: clipped_sum_sensitivity(1.0, to_unit=True, per_layer=True), "per_layer depends on the layers"),
        (lambda: clipped_sum_sensitivity(3e38, batch_size=8), "can overflow float32"),
        (
            lambda: clipped_sum_sensitivity(1.0, batch_size=2**24, layout=SumLayout(summed_in="float32")),
            "Sum fewer terms, or in float64",
        ),
        (lambda: Sensitivity(-1.0, "example", relation="zero_out"), "bound must be a distance"),
        (lambda: Sensitivity(math.nan, "example", relation="zero_out"), "bound must be a distance"),
        (
            lambda: Sensitivity(1.0, "example", relation="zero_out", denominator=0.0),
            "denominator must be None or a positive",
        ),
        (lambda: Sensitivity(1.0, "example", relation="zero_out", rounding=-1.0), "rounding must be 0 or more"),
        (
            lambda: Sensitivity(1.0, "example", relation="zero_out", in_steps=0.0),
            "in_steps must be None or a positive number",
        ),
        (
            lambda: Sensitivity(1.0, "example", relation="zero_out", batch_size=0),
            "batch_size must be a whole number, 1 or more",
        ),
        (lambda: Sensitivity(1.0, "example", relation="zero_out").noise_std(-1.0), "noise_multiplier must be a finite"),
        (
            lambda: Sensitivity(1.0, "example", relation="zero_out").noise_std(math.inf),
            "noise_multiplier must be a finite",
        ),
    ],
)
def test_errors_say_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_thresholds_that_are_no_numbers():
    with pytest.raises(TypeError, match="must be a number"):
        clipped_sum_sensitivity("1.0")
