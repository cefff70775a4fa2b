"""A threshold with reasons, on norms whose answer is known."""

import math
import tracemalloc

import numpy as np
import pytest

from gradclip.monitor.advice import advise, medians_before
from gradclip.monitor.records import Columns, Step


def columns(norms, max_norm=1.0):
    return Columns.of([Step(i, float(norm), max_norm) for i, norm in enumerate(norms, 1)])


def said(advice, words):
    return any(words in reason for reason in advice.reasons)


def test_twice_the_median_and_what_it_would_have_done():
    norms = np.full(1000, 0.7)
    norms[[300, 900]] = 70.0
    advice = advise(columns(norms))
    assert (advice.max_norm, advice.spikes, advice.steps) == (1.4, 2, 1000)
    assert said(advice, "twice the median of the newer half, 0.7")
    assert said(advice, "would have clipped 0.2% of 1,000 steps; 2 of 2 spikes")
    assert said(advice, "The threshold in use clipped 0.2%")
    assert said(advice, "not what trains best")
    by_name = {candidate.name: candidate for candidate in advice.candidates}
    assert (by_name["proposed"].share_clipped, by_name["proposed"].spikes_clipped) == (0.002, 2)
    assert (by_name["in use"].max_norm, by_name["50%"].max_norm) == (1.0, 0.7)
    assert str(advice).startswith("max_norm = 1.4\n- It is twice")


def test_norms_that_spread_widely():
    norms = np.tile([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0], 40)
    advice = advise(columns(norms))
    assert advice.max_norm == 5.0
    assert said(advice, "spread widely")
    assert advice.candidates[0].share_clipped == 0.0


def test_every_step_clipped_and_none():
    assert said(advise(columns([3.0] * 50)), "Every step was clipped")
    assert said(advise(columns([3.0] * 50, 9.0)), "never fired: the largest norm was 3")


def test_a_level_that_moves():
    assert said(advise(columns(np.geomspace(100, 1, 400))), "The level moved")
    assert not said(advise(columns(np.linspace(2, 1, 400))), "The level moved")


def test_norms_of_zero_propose_no_threshold_of_zero():
    advice = advise(columns([5.0] * 30 + [0.0] * 90))
    assert (advice.max_norm, advice.steps) == (10.0, 30)
    assert said(advice, "90 steps with a norm of 0 are left out")


def test_norms_at_the_ends_of_the_range():
    assert advise(columns([1e308] * 50)).max_norm == 2e300
    assert advise(columns([5e-324] * 50)).max_norm == 1e-323


def test_steps_that_were_skipped_are_not_those_at_which_nothing_happened():
    steps = [Step(i, 30.0 if i % 50 == 0 else 0.5, 1.0, skipped=i % 50 == 0) for i in range(1, 201)]
    advice = advise(Columns.of(steps))
    assert said(advice, "No step was clipped. 4 steps were skipped.")
    assert not said(advice, "never fired")


def test_a_threshold_that_moved_is_not_judged_as_the_last_one():
    steps = [Step(i, 0.5, 1.0 if i < 180 else 0.3) for i in range(1, 201)]
    advice = advise(Columns.of(steps))
    assert said(advice, "The thresholds in use clipped 10.5%")
    assert [one.share_clipped for one in advice.candidates if one.name == "in use at the end"] == [1.0]


@pytest.mark.parametrize("norms", [[], [1.0] * 19, [0.0] * 50, [math.nan] * 50])
def test_too_little_to_say(norms):
    advice = advise(columns(norms))
    assert (advice.max_norm, advice.candidates) == (None, ())
    assert "no threshold to propose" in str(advice)


def test_no_finite_threshold_is_in_use():
    assert [c.name for c in advise(columns([1.0] * 30, math.inf)).candidates] == ["proposed", "50%", "90%", "99%"]


def test_medians_are_of_the_steps_before():
    norms = np.arange(1.0, 301.0)
    found = medians_before(norms)
    assert np.isinf(found[:5]).all()
    assert found[5] == 3.0
    assert found[128] == np.median(norms[:128])
    assert found[299] == np.median(norms[171:299])
    assert medians_before(np.array([])).shape == (0,)


def test_medians_of_a_long_run_take_little_memory():
    norms = np.random.default_rng(0).random(100_000)
    tracemalloc.start()
    found = medians_before(norms)
    assert tracemalloc.get_traced_memory()[1] < 30e6  # all at once are 100 MB
    tracemalloc.stop()
    assert found[60_000] == np.median(norms[60_000 - 128 : 60_000])
    assert found[-1] == np.median(norms[-129:-1])
