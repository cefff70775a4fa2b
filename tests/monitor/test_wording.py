"""The sentences of the advice, word by word."""

import math

import numpy as np

from gradclip._src.monitor import wording
from gradclip._src.monitor.records import Columns, Step
from gradclip._src.monitor.trend import Level, Losses

LEVEL = Level(middle=1.0, low=0.9, high=1.1, first=1.0, last=1.0, top=1.0, healthy=1.0)


def test_losses():
    assert wording.on_losses(Losses("fell", 2.3, 1.0, 1.1, 200)) == "The loss fell from 2.3 to 1.1."
    assert wording.on_losses(Losses("rebounded", 2.3, 1.0, 2.1, 2000)) == (
        "The loss fell from 2.3 to 1 at step 2,000, then rose to 2.1."
    )
    assert wording.on_losses(Losses("unknown")) == wording.RECORD


def test_levels():
    assert wording.on_level(LEVEL) == "The median norm of the newer half is 1."
    assert wording.on_level(LEVEL._replace(high=3.0)) == (
        "The median norm of the newer half is 1, and 10% of those norms are above 3."
    )
    assert "rose: from 0.5 at the first steps to 1 at the last" in wording.on_level(LEVEL._replace(first=0.5))
    assert "fell: from 5 at the first steps" in wording.on_level(LEVEL._replace(first=5.0))


def test_numbers_of_steps_and_spikes():
    assert wording.on_spikes(0) == "There were no spikes."
    assert wording.on_spikes(1).startswith("There was 1 spike, a norm above 10 times")
    assert wording.on_spikes(1234).startswith("There were 1,234 spikes, norms above 10 times")
    columns = Columns.of([Step(1, 0.0, 1.0), Step(2, math.nan, 1.0, skipped=True)])
    assert wording.on_zeros(columns) == ("1 step with a norm of 0 was left out here.",)
    assert wording.on_policy(columns) == (
        "1 step with a norm that is NaN or infinite was skipped, as nonfinite= says.",
    )
    assert wording.on_zeros(Columns(*(np.array([]) for _ in columns))) == ()


def test_what_was_clipped_is_said_only_of_a_threshold_in_use():
    assert wording.on_clipping(0.5, math.nan, False) == ()
    assert wording.on_clipping(0.25, 0.5, False) == (
        "The threshold in use, 0.5, clipped 25.0% of the steps that were no spikes.",
    )
    assert wording.on_clipping(0.25, 0.5, True)[0].startswith("The thresholds in use clipped 25.0%")
