"""Verdicts on arrays in pieces."""

import math
from fractions import Fraction

import numpy as np
import pytest

from gradclip._src.core.norms import Order
from gradclip._src.updates.judge import checked_order, judge, measure
from gradclip._src.updates.verdict import Slot
from held import Held, held
from rational import at_most, random_leaf, random_threshold

TWO = Order(2.0)


@pytest.mark.parametrize("order", [1, 2, 3, 8, math.inf, -math.inf])
def test_random_trees_beside_fractions(order):
    rng = np.random.default_rng([5, int(order) if math.isfinite(order) else int(order > 0)])
    outcomes = []
    for _ in range(80):
        kinds = rng.choice(["float16", "bfloat16", "float32", "float64"], size=2)
        leaves = [random_leaf(rng, kind, int(rng.integers(1, 12))) for kind in kinds]
        if not all(np.isfinite(leaf.astype(float)).all() for leaf in leaves):
            continue
        threshold = random_threshold(rng, leaves, abs(order))
        found = judge([Held(str(i), x, 5) for i, x in enumerate(leaves)], threshold, Order(float(order)))
        outcomes.append(at_most(leaves, order, threshold))
        assert (found.ok, found.excess > 0) == (outcomes[-1], not outcomes[-1]), (leaves, threshold, found)
    assert {True, False} <= set(outcomes)


def test_a_comparison_of_floats_would_be_wrong():
    forged = np.array([1.0, 1e-5], np.float32)
    assert np.linalg.norm(forged) <= 1.0
    assert np.linalg.norm(forged.astype(np.float64)) > 1.0
    assert not judge(held(w=forged), 1.0, TWO)
    forged = np.array([1.0, 1e-30])
    assert np.linalg.norm(forged) <= 1.0
    found = judge(held(w=forged), 1.0, TWO)
    assert not found
    assert found.reason == "The norm 1 is larger than 1 by 5e-61."
    honest = np.full(10_000, 0.1)
    assert not math.fsum(honest**2) <= 10.0**2
    assert judge(held(w=honest), float(np.nextafter(10.0, 11)), TWO).excess == 0.0


def test_arrays_are_read_again_only_if_rounding_could_matter():
    for bound, reads in ((6.0, 1), (5.0, 2), (4.0, 2)):
        (array,) = arrays = held(w=np.array([3.0, 4.0]))
        judge(arrays, bound, TWO)
        assert array.reads == reads


def test_thresholds_are_not_rounded():
    assert not judge(held(w=np.array([0.1])), Fraction(1, 10), TWO)
    assert judge(held(w=np.array([0.1])), 0.1, TWO)
    assert not judge(held(w=np.array([2.0**53 + 4])), 2**53 + 3, TWO)


def test_infinity_bounds_nothing_but_what_is_finite():
    assert judge(held(w=np.full(4, 1e308)), math.inf, TWO)
    for bad in (math.nan, math.inf):
        assert not judge(held(w=np.array([1.0, bad])), math.inf, TWO)


def test_all_faults_are_told_in_one_sentence():
    template = [Slot("w", "float32", (2,)), Slot("b", "float32", (1,))]
    found = judge(held(w=np.array([3.0, 4.0]), x=np.array(["a"])), 1.0, TWO, template)
    assert found.reason == (
        "'b' is missing; 'x' is not in the template; 'w' has dtype float64, not float32; 'x' has dtype str32, which "
        "norms do not support."
    )
    assert math.isnan(found.norm)
    found = judge(held(w=np.array([np.inf]), x=np.array(["a"])), 1.0, TWO)
    assert (
        found.reason
        == "'x' has dtype str32, which norms do not support; 'w' holds 0 NaN and 1 infinite of its 1 numbers."
    )
    assert math.isnan(found.norm)
    assert math.isnan(found.excess)
    found = judge(held(w=np.float32([3.0, 4.0])), 1.0, TWO, template)
    assert found.reason == "'b' is missing; the norm 5 is larger than 1 by 4."
    assert (found.norm, found.excess) == (5.0, 4.0)


def test_integers_do_not_count():
    found = judge(held(w=np.array([3.0, 4.0]), n=np.array([10**6])), 5.0, TWO)
    assert found.ok
    assert found.reason == (
        "The norm 5 is at most 5; 1 array of integers ('n') does not count, so pass like= to have dtypes checked."
    )
    assert judge(held(n=np.array([1])), 5.0, TWO).reason == (
        "It holds no floating-point numbers, so there is nothing to measure."
    )


def test_nothing_is_refused():
    for arrays, why in (([], "It holds no arrays."), (held(w=np.zeros(0)), "have no elements.")):
        found = judge(arrays, 5.0, TWO)
        assert not found
        assert why in found.reason


def test_names_that_occur_twice_are_refused():
    found = judge([*held(w=np.ones(1)), *held(w=np.zeros(1))], 5.0, TWO)
    assert found.reason == "Several arrays are named 'w'."


def test_complex_numbers_have_three_orders():
    z = np.array([3 + 4j])
    assert judge(held(z=z), 5.0, TWO)
    assert judge(held(z=z), 5.0, Order(math.inf))
    assert "'z' is complex, and norms of order 1 cannot be decided" in judge(held(z=z), 9.0, Order(1.0)).reason


def test_an_error_at_the_second_look_is_a_refusal():
    class Torn(Held):
        def pieces(self):
            yield from super().pieces()
            if self.reads == 2:
                raise EOFError("the file is now shorter")

    found = judge([Torn("w", np.array([3.0, 4.0]))], 5.0, TWO)
    assert (found.ok, found.reason) == (False, "The file is now shorter.")
    assert math.isnan(found.norm)


def test_measurements():
    found = measure(held(w=np.array([3.0, 4.0]), n=np.array(1), b=np.array([np.inf])), TWO)
    assert (found.norm, found.arrays, found.numbers, found.integers) == (math.inf, 2, 3, ["n"])
    assert found.nonfinite == ["'b' holds 0 NaN and 1 infinite of its 1 numbers"]
    assert found.faults == []
    found = measure(held(w=np.array([3.0]), s=np.array(["a"])), TWO)
    assert found.faults == ["'s' has dtype str32, which norms do not support"]
    assert math.isnan(found.norm)


@pytest.mark.parametrize("ord", [1.5, 9, 0, math.nan, "two", True])
def test_orders_that_cannot_be_compared(ord):
    with pytest.raises(ValueError, match="ord"):
        checked_order(ord)
    assert checked_order(None) == TWO
