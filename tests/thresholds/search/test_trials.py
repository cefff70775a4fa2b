"""Which thresholds are about as good as the best, and which is in their middle."""

import math

import pytest

from gradclip._src.thresholds.search.trials import Trial, middle_of, plateau_of


def trials(losses, rate=None):
    """Return trials of thresholds 1, 2, 3, ... with these losses, each a number or one for each seed."""
    rows = [one if isinstance(one, tuple) else (one,) for one in losses]
    return [Trial(float(i), rate, row) for i, row in enumerate(rows, 1)]


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([3.0, 1.0, 2.0], 2.0),
        ([3.0, 1.015, 1.0, 1.01, 3.0], 3.0),
        ([3.0, 1.0, 1.01, 1.015, 3.0], 3.0),  # the middle, not the lowest
        ([3.0, 1.01, 1.0, 3.0], 3.0),  # the lower of two in the middle
        ([1.0, 1.0, 1.0, 1.0, 1.0], 3.0),
        ([1.0, 3.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0], 1.0),  # only neighbours count
        ([math.nan, 5.0, math.nan], 2.0),
        ([-5.0, -9.0, -5.0], 2.0),
        ([0.0], 1.0),
    ],
)
def test_the_middle_of_the_plateau(losses, best):
    assert middle_of(plateau_of(trials(losses))).max_norm == best


def test_a_threshold_at_which_a_seed_diverged_is_not_preferred():
    table = trials([(0.1, math.nan), (0.5, 0.6), (0.9, 0.8)])
    assert (plateau_of(table)[0].max_norm, table[0].diverged, table[0].loss) == (2.0, 1, math.inf)


def test_finite_losses_that_exploded_do_not_make_bad_ones_good():
    table = trials([2.2, 0.9, 0.31, 0.30, 0.9, 1e6, 1e9, 1e12, 1e12])
    assert [trial.loss for trial in plateau_of(table)] == [0.31, 0.30]


def test_seeds_that_differ_widen_the_plateau():
    narrow = trials([(1.2, 1.2), (1.0, 1.0), (1.2, 1.2), (3.0, 3.0), (4.0, 4.0)])
    wide = trials([(1.2, 1.2), (0.8, 1.2), (1.2, 1.2), (3.0, 3.0), (4.0, 4.0)])
    assert (len(plateau_of(narrow)), len(plateau_of(wide))) == (1, 3)
    assert wide[1].error == pytest.approx(0.2)


def test_each_rate_has_its_own_plateau():
    low, high = trials([2.0, 1.0, 1.01], 0.1), trials([0.5, 9.0, 0.9], 0.2)
    assert plateau_of(low + high) == (high[0],)


def test_nothing_is_best_if_all_diverged():
    assert plateau_of(trials([math.nan, math.nan])) == ()
    assert middle_of(()) is None


def test_losses_at_the_ends_of_the_range():
    table = trials([(1e308, 1e308), (-1e308, -1e308)])
    assert (plateau_of(table), math.isfinite(table[0].error)) == ((table[1],), True)
