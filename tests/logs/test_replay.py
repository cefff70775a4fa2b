"""What rules would have done is what gradclip's own calls do to gradients with these norms."""

import math

import numpy as np
import pytest

import gradclip
from gradclip._src.logs.replay import ThresholdRule, replay
from gradclip._src.monitor.records import Columns, Step

NORMS = [1.0, 2.0, 1.5, math.nan, 40.0, 0.0, 1.0, math.inf, 1.2, 90.0, 1.1]


def columns(norms):
    return Columns.of(Step(10 * place, norm, math.inf) for place, norm in enumerate(norms, 1))


@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("1.5", lambda: 1.5),
        ("adaptive", gradclip.AdaptiveThreshold),
        ("quantile:window=4", lambda: gradclip.AdaptiveThreshold(gradclip.QuantileRule(window=4))),
        ("skip:skip_above=2", lambda: gradclip.AdaptiveThreshold(skip_above=2.0)),
    ],
)
def test_it_does_what_calls_do(text, make):
    max_norm, monitor = make(), gradclip.Monitor()
    for norm in NORMS:
        gradclip.clip_grad_norm_({"w": np.array([norm])}, max_norm, monitor=monitor)
    (found,) = replay(columns(NORMS), [ThresholdRule.parse(text)])
    assert [(step.max_norm, step.clipped, step.skipped) for step in monitor.records] == list(
        zip(found.max_norms.tolist(), found.clipped.tolist(), found.skipped.tolist(), strict=True)
    )


def test_what_is_told_of_a_rule():
    norms = [1.0] * 30 + [50.0] + [1.0] * 8 + [3.0]
    fixed, skips = replay(columns(norms), [ThresholdRule.parse("2"), ThresholdRule.parse("skip")])
    assert fixed.plain() == {
        "rule": "2",
        "clipped_share": 0.05,
        "skipped_share": 0.0,
        "spikes": 1,
        "spikes_stopped": 1,
        "median_threshold": 2.0,
        "last_threshold": 2.0,
        "largest_after": 2.0,
    }
    assert (skips.plain()["clipped_share"], skips.plain()["skipped_share"]) == (0.025, 0.025)
    assert skips.after.max() == 2.0


def test_a_threshold_that_clips_nothing():
    (found,) = replay(columns([1.0, math.inf]), [ThresholdRule.parse("inf")])
    assert (found.plain()["clipped_share"], found.plain()["largest_after"]) == (0.0, 1.0)


def test_no_norm_is_left_of_one_that_is_not_finite():
    (told,) = replay(columns([math.inf, math.nan]), [ThresholdRule.parse("1.0")])
    assert np.isnan(told.after).all()
    assert math.isnan(told.plain()["largest_after"])
