"""The table and the notes below it."""

import math

import pytest

from gradclip._src.thresholds.search.find import MaxNormSearch
from gradclip._src.thresholds.search.trials import Trial


def search(losses, rate=None, seeds=1):
    """Return a search over thresholds 1, 2, 3, ... with these losses, each a number or one for each seed."""
    rows = [one if isinstance(one, tuple) else (one,) * seeds for one in losses]
    return MaxNormSearch(tuple(Trial(float(i), rate, row) for i, row in enumerate(rows, 1)), tuple(range(seeds)))


def test_all_diverged():
    found = search([math.nan, math.nan])
    assert (found.max_norm, found.learning_rate, found.best, found.plateau) == (None, None, None, ())
    assert str(found).startswith("Every training diverged. Try lower thresholds or learning rates.")


def test_the_table():
    found = search([(3.0, 3.5), (1.0, 1.2), (1.1, 1.2), (9.0, math.nan), (9.0, 9.0)], 0.1, seeds=2)
    assert str(found).splitlines() == [
        "max_norm = 2, learning_rate = 0.1",
        " learning rate  max_norm   mean loss  of 2 seeds",
        "           0.1         1        3.25",
        "           0.1         2         1.1  best",
        "           0.1         3        1.15  about as good",
        "           0.1         4    diverged  1 of 2 seeds",
        "           0.1         5           9",
    ]


@pytest.mark.parametrize(
    ("losses", "note"),
    [
        ([1.0, 2.0, 3.0], "The lowest threshold is among the best: try lower ones too."),
        ([3.0, 2.0, 1.0], "The highest threshold is among the best: try higher ones too."),
        ([1.0, 1.0, 1.0], "At this learning rate, all thresholds are about as good."),
    ],
)
def test_a_search_that_is_too_narrow_says_so(losses, note):
    assert str(search(losses)).splitlines()[-1] == note


def test_nothing_lies_beyond_zero_and_infinity():
    assert "try" not in str(MaxNormSearch((Trial(0.0, None, (1.0,)), Trial(1.0, None, (2.0,))), (0,)))
    assert "try" not in str(MaxNormSearch((Trial(1.0, None, (2.0,)), Trial(math.inf, None, (1.0,))), (0,)))
