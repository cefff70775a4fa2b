"""Advice on norms whose level fell, rose or alternates, and on losses that are partly recorded."""

import math

import numpy as np
import pytest

from gradclip._src.monitor.advice import advise, rounded_up
from histories import FALLING, STEADY, columns, said, summary


def noisy(norms, spread=0.05):
    return norms * np.exp(spread * np.random.default_rng(2).standard_normal(len(norms)))


@pytest.mark.parametrize(
    ("losses", "start"), [(FALLING, "The level of the norms is healthy, but it"), (None, "The norms")]
)
@pytest.mark.parametrize("at", [20, 100, 250])
def test_a_level_that_fell_a_thousandfold_has_a_threshold_for_each(at, losses, start):
    advice = advise(columns(noisy(np.where(np.arange(300) < at, 1000.0, 1.0)), losses=losses))
    high, low = advice.try_values
    assert (advice.state, advice.max_norm) == ("spikes", high)
    assert 900 < high < 2300
    assert 1.9 < low < 2.3
    assert advice.proposal.startswith(
        f"{start} fell far. To clip only spikes: max_norm = {high:g} from the start, {low:g}"
    )


def test_a_few_large_norms_at_the_start_are_no_level():
    norms = noisy(np.ones(300))
    norms[:5] = 1e4
    advice = advise(columns(norms, losses=FALLING))
    assert summary(advice) == ("spikes", (2.0, 1.0, 0.34))
    assert said(advice, "The higher one lasted for a few steps only and is not counted")


@pytest.mark.parametrize("other", [20.0, 1000.0])
def test_norms_that_alternate_do_not_rise(other):
    advice = advise(columns(np.where(np.arange(300) % 2, other, 1.0), losses=FALLING))
    assert summary(advice) == ("spikes", (2 * other, other, rounded_up(other / 3)))
    assert "rising" not in str(advice)


def test_five_first_norms_drawn_low_are_no_rise():
    norms = np.exp(2 * np.random.default_rng(0).standard_normal(300))
    norms[:5] = np.sort(norms)[30:35]
    assert advise(columns(norms, losses=FALLING)).state == "spikes"


def test_a_level_that_rose_and_then_held_is_not_rising():
    norms = noisy(np.r_[np.geomspace(0.01, 1.0, 50), np.ones(250)])
    advice = advise(columns(norms, losses=FALLING))
    assert advice.proposal.startswith("The level of the norms rose, then held. To clip only spikes: max_norm = 2")
    assert advise(columns(norms.cumsum(), losses=FALLING)).proposal.startswith("The level of the norms is rising")


@pytest.mark.parametrize("max_norm", [1e-12, 9e-4])
def test_a_threshold_that_leaves_next_to_nothing_is_not_left_if_nothing_moves(max_norm):
    still = np.tile([2.3, 2.31], 150)
    advice = advise(columns(STEADY, max_norm, still))
    assert summary(advice) == ("spikes", (2.0, 1.0, 0.34))
    assert said(advice, "leaves less than a thousandth of each gradient")
    moving = np.full(300, max_norm)
    moving[:10] = 1.0
    assert advise(columns(STEADY, moving, still)).state == "spikes"
    assert advise(columns(STEADY, max_norm, FALLING)).state == "leave"
    assert advise(columns(STEADY, 0.1, still)).state == "leave"


def test_losses_that_become_infinite_are_no_healthy_training():
    losses = FALLING.copy()
    losses[200:] = math.inf
    advice = advise(columns(STEADY, losses=losses))
    assert advice.state == "level"
    assert said(advice, "The loss rose from 1.99 to inf")
    losses[200:296] = FALLING[200:296]
    assert advise(columns(STEADY, losses=losses)).state == "spikes"


def test_losses_at_some_steps_are_counted():
    some = np.full(300, math.nan)
    some[::20] = FALLING[::20]
    few = advise(columns(STEADY, losses=some))
    assert said(few, "Only 15 finite losses were recorded. It takes 20")
    some[::10] = FALLING[::10]
    assert said(
        advise(columns(STEADY, losses=some)), "The loss is finite at 30 of 300 steps, the last of them step 291."
    )
    assert not said(advise(columns(STEADY, losses=FALLING)), "is finite at")
    assert not said(advise(columns(STEADY)), "is finite at")
