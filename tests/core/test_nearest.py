"""One number for all elements, products rounded to nearest: the bound, and where there is no such number."""

import math
from fractions import Fraction

import numpy as np
import pytest

from gradclip.backends.formats import format_named
from gradclip.core.nearest import bounds, bounds_of_processes
from gradclip.core.norms import Order
from rational import at_most

TWO = Order(2.0)
ERROR = 2.0**-40


def of(*kinds):
    """Return how many elements there are of each dtype."""
    return {format_named(dtype): count for dtype, count in kinds}


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
        if found is None:
            assert dtype == "float16"
            continue
        if norm <= found.limit:
            kept += 1
            assert at_most([x], p, threshold)
            continue
        number = found.numerator / norm - (2.0**-150 if dtype != "float64" else 0.0)
        wide = np.float64 if dtype == "float64" else np.float32
        results = (x.astype(wide) * wide(number)).astype(dtype)
        assert at_most([results], p, threshold), (x, threshold)
    assert kept > 300


def test_there_is_no_number_where_results_would_be_much_smaller_than_they_may_be():
    halves = of(("float16", 1_000_000))
    assert bounds(halves, TWO, 1e-3, ERROR) is None
    assert bounds(halves, TWO, 1.0, ERROR) is not None
    assert bounds(of(("float32", 1_000_000)), TWO, 1e-37, ERROR) is None
    assert bounds(of(("float32", 1_000_000)), TWO, 1e-30, ERROR) is not None
    assert bounds(of(("float32", 3)), TWO, 1.0, ERROR, floor=1e-3) is None


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
    found = [bounds_of_processes(arrays, 1.0, ERROR) for arrays in (one, other)]
    assert found[0].limit == found[1].limit
    assert found[0].numerator == found[1].numerator
    shares = [{element.name: share for element, share in each.shares.items()} for each in found]
    assert shares[0]["float32"] == shares[1]["float32"] < 1
    assert bounds_of_processes(of(("float16", 8)), 1.0, ERROR) is None
    assert bounds_of_processes(one, 1e-20, ERROR) is None
