"""One number for all elements, products rounded to nearest: the bound, and where there is no such number."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import gradclip
from frameworks import ALL
from gradclip._src.backends.host.backend import HOST
from gradclip._src.core.formats import FLOAT16, FLOAT32, format_named
from gradclip._src.core.norms import Norm, Order
from gradclip._src.core.one_factor import bounds, bounds_of_processes, bounds_on_device, factor_of
from rational import at_most

TWO = Order(2.0)
ERROR = 2.0**-40


def of(*kinds):
    """Return how many elements there are of each dtype."""
    return {format_named(dtype): count for dtype, count in kinds}


def stepped(y):
    """Move numbers of float16 one step toward zero."""
    return y - np.clip(y, -FLOAT16.step, FLOAT16.step).astype(np.float16)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_the_bound_holds_for_the_largest_norm_that_its_error_allows(dtype, p):
    rng = np.random.default_rng(0)
    kept = 0
    for _ in range(3000):
        x = (rng.standard_normal(7) * 2.0 ** rng.integers(-14, 15)).astype(dtype)
        norm = float(np.linalg.norm(x.astype(np.float64), p)) * (1 - ERROR / 2)
        threshold = norm * float(rng.choice([1e-2, 0.5, 1 - 2.0**-39, 1.0, 1 + 2.0**-38]))
        found = bounds(of((dtype, 7)), Order(p), threshold, ERROR)
        if norm <= found.limit:
            kept += 1
            assert at_most([x], p, threshold)
            continue
        number = found.numerator / norm - (2.0**-150 if dtype != "float64" else 0.0)
        wide = np.float64 if dtype == "float64" else np.float32
        results = (x.astype(wide) * wide(max(number, 0.0))).astype(dtype)
        if found.stepped:
            results = stepped(results)
        assert at_most([results], p, threshold), (x, threshold)
    assert kept > 300


def test_stepped_products_of_float16_exceed_the_exact_ones_by_their_relative_rounding_alone():
    x = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
    rng = np.random.default_rng(1)
    numbers = np.float32(2.0 ** rng.uniform(-40, 0, 60))
    for c in [*numbers, np.float32(1 - 2.0**-24), np.float32(2.0**-140), np.float32(0)]:
        products = x.astype(np.float32) * c
        results = stepped(products.astype(np.float16))
        exact = x.astype(np.float64) * np.float64(c)  # 11 and 24 bits: no rounding
        assert np.all(results <= exact * (1 + 2.0**-11) * (1 + 2.0**-24))
        assert np.all(results >= np.maximum(0.0, exact * (1 - 2.0**-11) - 2.5 * FLOAT16.step))
        # The same where what is moved has not been rounded to float16.
        at_once = (products - np.clip(products, -FLOAT16.step, FLOAT16.step)).astype(np.float16)
        assert np.all(at_once <= exact * (1 + 2.0**-11) * (1 + 2.0**-23))
        small = exact < 2.0**-13 * (1 - 2.0**-10)
        assert np.all(results[small] <= exact[small])
        assert np.all(at_once[small] <= exact[small])


def test_there_is_no_number_where_results_would_be_much_smaller_than_they_may_be():
    assert bounds(of(("float32", 1_000_000)), TWO, 1e-37, ERROR) is None
    assert bounds(of(("float32", 1_000_000)), TWO, 1e-30, ERROR) is not None
    assert bounds(of(("float32", 3)), TWO, 1.0, ERROR, floor=1e-3) is None


def test_float16_is_stepped_where_what_its_products_add_is_not_small():
    halves = of(("float16", 1_000_000))
    assert not bounds(halves, TWO, 1.0, ERROR).stepped
    for order, threshold in ((TWO, 1e-3), (Order(1.0), 1.0)):
        found = bounds(halves, order, threshold, ERROR)
        assert found.stepped
        assert found.numerator >= threshold * (1 - 2.0**-10)
    assert not bounds(of(("bfloat16", 1_000_000)), Order(1.0), 1.0, ERROR).stepped
    assert bounds(of(("float16", 8), ("float32", 1_000_000)), TWO, 1e-40, ERROR) is None


def thresholds_on_device(*numbers):
    return np.array(numbers, np.float64)


def test_a_threshold_on_a_device_gives_what_the_same_number_gives():
    leaves = of(("float32", 1_000_000), ("bfloat16", 8))
    numbers = (0.0, 1e-30, 0.3, 7.0, 1e300)
    found = bounds_on_device(HOST, leaves, TWO, thresholds_on_device(*numbers), ERROR, 0.0)
    for number, limit, numerator in zip(numbers, found.limit, found.numerator, strict=True):
        known = bounds(leaves, TWO, number, ERROR)
        assert (limit, numerator) == pytest.approx((known.limit, known.numerator), rel=1e-15, abs=0)
        assert found.shares == known.shares
    assert found.limit[0] == found.numerator[0] == 0
    assert not found.stepped
    assert bounds_on_device(HOST, of(("float16", 8)), TWO, np.float64(1.0), ERROR, 0.0).stepped


def test_extreme_thresholds_on_a_device():
    leaves = of(("float64", 4))
    found = bounds_on_device(HOST, leaves, TWO, thresholds_on_device(-1.0, 2.0**-1000, np.inf, np.nan), ERROR, 0.0)
    assert found.limit[[0, 2]].tolist() == [0.0, np.finfo(np.float64).max]
    assert (1 - 2 * ERROR) * 2.0**-1000 < found.limit[1] < (1 - ERROR) * 2.0**-1000
    assert found.numerator[:2].tolist() == [0.0, 0.0]
    assert np.isnan([found.limit[3], found.numerator[3]]).all()


def test_thresholds_on_a_device_beside_a_floor():
    thresholds = thresholds_on_device(0.0, 2.0**-101, 2.0**-99, 1.0)
    found = bounds_on_device(HOST, of(("float32", 4)), TWO, thresholds, ERROR, 2.0**-120)
    # What is read as zero may be as large as the first two.
    assert found.limit[:2].tolist() == [-1.0, -1.0]
    assert found.numerator[:2].tolist() == [0.0, 0.0]
    assert (found.limit[2:] < thresholds[2:] - 2.0**-120).all()
    assert (found.numerator[2:] > thresholds[2:] * (1 - 2.0**-18)).all()
    by = factor_of(HOST, Norm(np.zeros(4), None, ERROR, 2.0**-120), found)
    assert by.factors["float32"].tolist() == [0.0, 0.0, 1.0, 1.0]


def test_numbers_computed_in_float32_are_lowered_more():
    leaves = of(("float32", 8), ("float16", 3))
    wide = bounds(leaves, TWO, 1.0, ERROR)
    narrow = bounds(leaves, TWO, 1.0, ERROR, wide=FLOAT32)
    assert narrow.numerator == pytest.approx(wide.numerator * (1 - 2.0**-21), rel=1e-13)
    assert narrow.limit == pytest.approx(wide.limit * (1 - 2.0**-21), rel=1e-13)
    assert bounds(leaves, TWO, math.inf, ERROR, wide=FLOAT32).limit == FLOAT32.largest
    for threshold in (2.0**-61, 2.0**101):
        assert bounds(of(("float32", 8)), TWO, threshold, ERROR, wide=FLOAT32) is None
    assert bounds(of(("float64", 8), ("float32", 8)), TWO, 1.0, ERROR, wide=FLOAT32) is None


def test_extreme_thresholds():
    leaves = of(("float32", 8))
    assert bounds(leaves, TWO, 0.0, ERROR).numerator == 0.0
    assert bounds(leaves, TWO, 0.0, ERROR, floor=1e-40) is None
    assert bounds(leaves, TWO, math.inf, ERROR).limit == np.finfo(np.float64).max
    assert bounds(of(("float64", 8)), TWO, 2.0**-501, ERROR) is None
    assert bounds(of(), TWO, 1.0, ERROR).shares == {}


def test_each_dtype_has_its_own_share():
    shares = bounds(of(("float64", 8), ("float32", 8), ("float16", 8)), TWO, 1.0, ERROR).shares
    assert [element.name for element in shares] == ["float64", "float32", "float16"]
    assert Fraction(shares[next(iter(shares))]) == 1
    assert list(shares.values()) == sorted(shares.values(), reverse=True)


def test_processes_come_to_the_same_numbers_whatever_they_hold():
    one, other = of(("float32", 8), ("bfloat16", 3)), of(("float32", 1_000_000))
    for threshold in (1.0, thresholds_on_device(1.0)):
        found = [bounds_of_processes(HOST, arrays, threshold, ERROR) for arrays in (one, other)]
        assert found[0].limit == found[1].limit
        assert found[0].numerator == found[1].numerator
        shares = [{element.name: share for element, share in each.shares.items()} for each in found]
        assert shares[0]["float32"] == shares[1]["float32"] < 1
    assert bounds_of_processes(HOST, of(("float16", 8)), 1.0, ERROR).stepped
    assert bounds_of_processes(HOST, one, 1e-20, ERROR) is None
    assert bounds_of_processes(HOST, one, thresholds_on_device(1e-20), ERROR).numerator == 0


@pytest.mark.parametrize("exponent", [-850, -901, -1000, -1021, -1045])
def test_small_thresholds_on_a_device_keep_what_is_not_above_them(exponent):
    rng, threshold = np.random.default_rng(exponent + 2000), 2.0**exponent
    device = next(f for f in ALL if f.name == "torch-device")
    for share in (0.0, 1e-6, 0.5, 0.99, 1.5, 1e20):
        direction = rng.standard_normal(5)
        x = np.ldexp(direction / np.linalg.norm(direction) * share, exponent)
        with device.mode():
            clipped, _ = gradclip.clip_by_global_norm(
                [torch.from_numpy(x)], torch.tensor(threshold, dtype=torch.float64)
            )
        assert at_most([clipped[0].numpy()], 2, threshold)
        assert (clipped[0].numpy() == x).all() == (share < 1)
