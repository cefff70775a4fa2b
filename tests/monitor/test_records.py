"""Steps in plain numbers: what is clipped, skipped and not finite, worked out by hand."""

import math

import numpy as np
import pytest

from gradclip._src.monitor.records import Columns, Counts, Layers, LayerTable, Overview, Step, percentiles

STEPS = [
    Step(1, 5.0, 1.0),
    Step(2, 1.0, 1.0),
    Step(3, math.nan, 1.0),
    Step(4, math.inf, 1.0, skipped=True),
    Step(5, 300.0, 1.0, skipped=True),
    Step(6, 0.0, 0.0),
    Step(7, 2.0, math.inf),
    Step(8, 2.0, 0.0),
    Step(9, 2.0, -1.0),
]


def test_coefficients():
    found = [step.coefficient for step in STEPS]
    assert found[:2] == [0.2, 1.0]
    assert math.isnan(found[2])
    assert found[3:] == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]


def test_what_is_clipped_is_neither_skipped_nor_nan():
    assert [step.step for step in STEPS if step.clipped] == [1, 8, 9]
    assert [step.step for step in STEPS if not step.finite] == [3, 4]
    assert Counts().plus(STEPS) == Counts(steps=9, num_clipped=3, num_skipped=2, num_nonfinite=2)
    assert Counts().plus(STEPS[:4]).plus(STEPS[4:]) == Counts().plus(STEPS)
    assert Counts(4, 1).clipped_share == 0.25
    assert math.isnan(Counts().clipped_share)


def test_numbers_are_plain_floats():
    layers = Layers(("a", "b", "c"), np.array([1.0, math.nan, 2.0], np.float32))
    numbers = Step(1, 5.0, 1.0, layers=layers).numbers(top=2)
    assert all(type(value) is float for value in numbers.values())
    expected = {"norm": 5.0, "max_norm": 1.0, "coefficient": 0.2, "clipped": 1.0, "skipped": 0.0, "nonfinite": 0.0}
    assert {key: numbers[key] for key in expected} == expected
    assert list(numbers)[6:] == ["layers/b", "layers/c"]  # NaN is the first to be told
    assert numbers["layers/c"] == 2.0
    assert list(STEPS[0].numbers(top=2)) == list(expected)


def test_columns():
    columns = Columns.of(STEPS)
    assert columns.steps.tolist() == list(range(1, 10))
    assert columns.clipped.sum() == 3
    assert columns.skipped.tolist() == [False] * 3 + [True] * 2 + [False] * 4
    assert columns.finite.sum() == 7
    assert Columns.of([]).norms.shape == (0,)


def test_layers_of_steps_that_recorded_others():
    first = Layers(("a", "b"), np.array([1.0, 2.0], np.float32))
    second = Layers(("b", "c"), np.array([4.0, math.inf], np.float32))
    table = LayerTable.of([Step(1, 1.0, 1.0, layers=first), Step(2, 1.0, 1.0), Step(3, 1.0, 1.0, layers=second)])
    assert (table.steps.tolist(), table.names) == ([1, 3], ("a", "b", "c"))
    np.testing.assert_array_equal(table.norms, [[1, 2, math.nan], [math.nan, 4, math.inf]])
    assert table.medians().tolist() == [1.0, 3.0, 0.0]
    assert table.top(2).names == ("b", "a")
    np.testing.assert_array_equal(table.top(1).norms, [[2], [4]])
    assert table.largest(2) == {"b": 3.0, "a": 1.0}
    assert LayerTable.of(STEPS) is None


def test_layers_with_spikes_are_shown_below_the_largest():
    rows = [[5.0, 4.0, 3.0, 2.0, 1.0]] * 5 + [[5.0, 4.0, math.nan, 900.0, 11.0]]
    names = tuple("abcde")
    table = LayerTable.of([Step(i, 1.0, 1.0, layers=Layers(names, np.array(row))) for i, row in enumerate(rows, 1)])
    assert table.shown(9).names == names
    assert table.shown(3).names == ("a", "d", "e")
    assert table.shown(3, spikes=1).names == ("a", "b", "d")
    assert table.shown(4).names == ("a", "b", "c", "e")


def test_an_overview_is_of_kept_steps_and_counts_of_all():
    layers = Layers(("a", "b"), np.array([1.0, 2.0], np.float32))
    overview = Overview.of([*STEPS, Step(10, 1.0, 1.0, layers=layers)], Counts(20), top=1)
    assert (len(overview.columns.steps), overview.last.step, overview.counts.steps) == (10, 10, 20)
    assert overview.top_layers == {"b": 2.0}
    nothing = Overview.of([], Counts(), top=1)
    assert (nothing.last, nothing.layers, nothing.top_layers) == (None, None, {})


def test_percentiles_are_of_finite_norms():
    assert percentiles(np.array([1.0, 3.0, math.nan, math.inf]), (0, 50, 100)) == {0: 1.0, 50: 2.0, 100: 3.0}
    assert percentiles(np.array([math.nan])) == {}
    assert percentiles(np.arange(101.0))[90] == pytest.approx(90.0)
