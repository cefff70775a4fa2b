"""The verdicts of the table of parity, on answers made by hand, right ones and wrong ones."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from side_by_side.cases import CASES, Case, random_case
from side_by_side.exact import (
    Clamp,
    Norm,
    Rule,
    Summed,
    columns,
    each_leaf,
    equal_shares,
    mean_norm,
    power_sum,
    root_mean_square,
    shares_by_size,
    together,
)
from side_by_side.functions import Function, Library
from side_by_side.run import bounds, rows
from side_by_side.verdict import Answer, Refusal, judge

UNIT = np.float32(2.0**-24)  # in the last place of 0.6 and 0.8
THREE_FOUR = Case([np.array([3.0, 4.0], np.float32)], 1.0)
RIGHT = np.array([0.6, 0.8], np.float32) - UNIT  # just below, as ours are


def answer(*leaves, norms=()):
    return Answer([np.asarray(x) for x in leaves], [np.asarray(x) for x in norms])


def kind(theirs, ours, case=THREE_FOUR, rule=Rule(together), defined=True):  # noqa: B008
    verdict = judge(theirs, ours, rule, case, defined)
    return verdict.kind, verdict.why


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (RIGHT, RIGHT, ("same", "same")),
        (RIGHT + 4 * UNIT, RIGHT, ("same", "same")),
        (RIGHT - 9 * UNIT, RIGHT, ("better", "nearer")),
        (RIGHT * np.float32(math.nan), RIGHT, ("better", "nearer")),
        (RIGHT, RIGHT - 9 * UNIT, ("different", "values")),
        (RIGHT, RIGHT * np.float32(math.nan), ("different", "bound")),
        (RIGHT, RIGHT + 3 * UNIT, ("different", "bound")),
        (RIGHT, RIGHT.astype(np.float64), ("different", "dtype")),
        (RIGHT, RIGHT[:1], ("different", "shapes")),
        (RIGHT * np.float32(0.5), RIGHT * np.float32(0.6), ("different", "far")),
        (RIGHT.astype(np.float16), RIGHT * np.float32(1 - 1e-4), ("different", "far")),
    ],
)
def test_verdicts_on_leaves(theirs, ours, expected):
    assert kind(answer(theirs), answer(ours)) == expected


def test_ours_is_better_for_the_bound_only_near_what_is_right():
    case = Case([np.array([3.0, 4.0])], 1.0)
    right, lowered = np.array([0.6, 0.8]), np.array([0.6, 0.8]) * (1 - 30 * 2.0**-52)
    above = np.nextafter(right, 1.0)
    assert kind(answer(above), answer(lowered), case) == ("better", "bound")
    assert kind(answer(right * (1 - 2.0**-52)), answer(lowered), case) == ("different", "values")
    assert kind(answer(above), answer(right * (1 - 1e-7)), case) == ("different", "far")
    assert kind(answer(above), answer(right * 0.9), case) == ("different", "far")


def test_verdicts_on_norms():
    five, other = np.float32(5.0), np.float32(5.001)
    assert kind(answer(RIGHT, norms=[five]), answer(RIGHT, norms=[five])) == ("same", "same")
    assert kind(answer(RIGHT, norms=[other]), answer(RIGHT, norms=[five])) == ("better", "nearer")
    assert kind(answer(RIGHT, norms=[five]), answer(RIGHT, norms=[other])) == ("different", "far")


def test_verdicts_on_errors():
    refusal, negative = Refusal("ValueError", ""), Case(THREE_FOUR.leaves, -1.0)
    turned, zeros, spoiled = answer(-RIGHT), answer(0 * RIGHT), answer(RIGHT * np.float32(math.nan))
    assert kind(turned, refusal, negative, defined=False) == ("better", "refused")
    assert kind(zeros, refusal, negative, defined=False) == ("different", "refused")
    assert kind(spoiled, refusal, negative, defined=False) == ("different", "refused")
    assert kind(answer(RIGHT), refusal) == ("different", "refused")
    assert kind(refusal, answer(RIGHT)) == ("better", "answered")
    assert kind(refusal, zeros) == ("different", "answered")
    assert kind(refusal, refusal) == ("same", "refused")
    for theirs in (refusal, turned):
        assert kind(theirs, Refusal("AttributeError", ""), negative, defined=False) == ("different", "fault")


def test_where_nothing_is_right_answers_must_be_equal():
    case = Case([np.array([math.nan, 4.0], np.float32)], 1.0)
    both, one = (answer(np.array([math.nan, x], np.float32)) for x in (math.nan, 0.0))
    assert kind(both, both, case) == ("same", "same")
    assert kind(one, both, case) == ("different", "no right answer")


@pytest.mark.parametrize(
    ("rule", "leaves", "threshold", "expected"),
    [
        (Rule(together), [[3.0], [4.0]], 1.0, [["0.6"], ["0.8"]]),
        (Rule(together), [[3.0], [4.0]], 5.0, [["3"], ["4"]]),
        (Rule(together), [[3.0], [4.0]], math.inf, [["3"], ["4"]]),
        (Rule(together, 1), [[3.0], [-5.0]], 4.0, [["1.5"], ["-2.5"]]),
        (Rule(together, math.inf), [[3.0], [-4.0]], 1.0, [["0.75"], ["-1"]]),
        (Rule(together, added=1.0), [[3.0], [4.0]], 3.0, [["1.5"], ["2"]]),
        (Rule(together, to_unit=True), [[3.0], [4.0]], 10.0, [["0.3"], ["0.4"]]),
        (Rule(together, to_unit=True), [[3.0], [4.0]], 0.0, [["0.6"], ["0.8"]]),
        (Rule(together, blanks=True), [[3.0, math.nan], [4.0]], 1.0, [["0.6", "0"], ["0.8"]]),
        (Rule(each_leaf), [[3.0, 4.0], [0.5]], 1.0, [["0.6", "0.8"], ["0.5"]]),
        (Rule(root_mean_square), [[6.0, 8.0, 0.0, 0.0]], 1.0, [["1.2", "1.6", "0", "0"]]),
        (Rule(mean_norm), [[6.0, 8.0]], 2.5, [["3", "4"]]),
        (Rule(equal_shares), [[3.0], [5.0], [0.0], [0.0]], 4.0, [["2"], ["2"], ["0"], ["0"]]),
        (Rule(shares_by_size), [[3.0], [5.0, 0.0, 0.0]], 4.0, [["2"], [str(Decimal(12).sqrt()), "0", "0"]]),
        (Rule(columns), [[[3.0, 0.5], [4.0, 0.5]]], 2.0, None),
        (Clamp(), [[3.0, -0.5, -math.inf]], 1.0, [["1", "-0.5", "-1"]]),
    ],
)
def test_what_is_right(rule, leaves, threshold, expected):
    found = rule.exact([np.array(x) for x in leaves], threshold).leaves
    if expected is None:  # The columns' limits are 2 times the root of 2, and the first column's norm is 5.
        expected = [[str(3 * Decimal(8).sqrt() / 5), "0.5", str(4 * Decimal(8).sqrt() / 5), "0.5"]]
    for leaf, right in zip(found, expected, strict=True):
        assert [abs(x - Decimal(y)) < Decimal("1e-25") for x, y in zip(leaf, right, strict=True)] == [True] * len(leaf)


def test_the_parts_of_complex_numbers_are_in_one_column():
    (found,) = Rule(columns).exact([np.array([[3.0 + 4.0j, 0.5j]])], 2.5).leaves
    assert list(map(float, found)) == [1.5, 2.0, 0.0, 0.5]


def test_sums_norms_and_what_has_no_answer():
    batch = [np.array([[3.0, 4.0], [0.3, 0.4]])]
    summed = Summed(Rule(together)).exact(batch, 1.0).leaves[0]
    assert [round(float(x), 12) for x in summed] == [0.9, 1.2]
    assert Norm().exact(batch, 0.0).norms[0].sqrt() > Decimal("2.2")
    assert Rule(together).exact([np.array([math.nan, 1.0])], 1.0) == ([[None, None]], [None])
    assert Clamp().exact([np.array([math.nan, 2.0])], 1.0).leaves == [[None, Decimal(1)]]
    assert power_sum(np.array([3.0, -3.0, 4.0]), 2) == Fraction(34)


def test_excess_is_exact():
    just = np.array([0.6, 0.8])
    above = Fraction(0.6) ** 2 + Fraction(0.8) ** 2 > 1
    assert (Rule(together).excess([just], [10 * just], 1.0) > 0.0) == above
    assert Rule(together).excess([np.array([1.0, 2.0**-40])], [10 * just], 1.0) == pytest.approx(2.0**-81)
    assert Rule(together).excess([2 * just], [10 * just], 1.0) == pytest.approx(1.0)
    assert Summed(Rule(together)).excess([2 * just], [10 * just[None]], 1.0) == pytest.approx(1.0)
    assert Rule(together).excess([just], [10 * just], 0.0) == math.inf


def by_numpy(lowered, wrong_in=None):
    """Return a call that clips in float64, by a lowered coefficient, and does not clip one case at all."""

    def call(leaves, threshold):
        if wrong_in is not None and leaves is CASES[wrong_in].leaves:
            return Answer(leaves)
        wide = [x.astype(np.float64) for x in leaves]
        norm = math.sqrt(sum(float((x * x).sum()) for x in wide))
        factor = min(1.0, threshold / norm * (1 - lowered)) if norm else 1.0
        return Answer([(x * factor).astype(y.dtype) for x, y in zip(wide, leaves, strict=True)])

    return call


def test_a_planted_difference_is_found():
    few, planted = ("clipped, float32", "threshold 0", "threshold inf"), "clipped, float32"
    for wrong_in, expected in ((None, []), (planted, [planted])):
        function = Function("clip", by_numpy(0.0), by_numpy(2.0**-22, wrong_in), Rule(together), few)
        found = rows(Library("planted", "0", [function]))
        assert [row["case"] for row in found if row["kind"] == "different"] == expected


def test_a_bound_that_is_not_kept_is_found():
    function = Function("clip", by_numpy(0.0), by_numpy(2.0**-22), Rule(together), formats=("float32",))
    (found,) = bounds(Library("planted", "0", [function]), 100)
    assert found["ours"] == {"kept": 100, "worst": 0.0, "worst_float32": 0.0}
    assert 20 < found["theirs"]["kept"] < 80
    assert 2.0**-30 < found["theirs"]["worst"] == found["theirs"]["worst_float32"] < 2.0**-23


def test_random_inputs_are_clipped():
    for seed in range(100):
        case = random_case(seed, "bfloat16")
        assert sum(float((x.astype(np.float64) ** 2).sum()) for x in case.leaves) > 4 * case.threshold**2
        assert all(np.array_equal(x, y) for x, y in zip(case.leaves, random_case(seed, "bfloat16").leaves, strict=True))
