"""The state and the thresholds to try, on norms and losses whose answer is known."""

import math

import numpy as np
import pytest

import gradclip
import long_chain
from gradclip._src.monitor.advice import advise, rounded_up
from histories import FALLING, STEADY, columns, said, summary

RISING = np.linspace(2.0, 2.4, 300)


def with_spikes(norms, every=50, times=100.0):
    return np.where(np.arange(1, len(norms) + 1) % every == 0, times * norms, norms)


def test_spikes_on_a_healthy_level():
    advice = advise(columns(with_spikes(STEADY), losses=FALLING))
    assert summary(advice) == ("spikes", (2.0, 1.0, 0.34))
    assert (advice.max_norm, advice.steps, advice.spikes) == (2.0, 300, 6)
    assert str(advice).startswith(
        "The level of the norms is healthy. To clip only spikes: max_norm = 2\n- The loss fell"
    )
    first = advice.candidates[0]
    assert (first.name, first.max_norm, first.clipped_share, first.spikes_clipped) == ("to try first", 2.0, 0.02, 6)


def test_without_losses_it_says_what_it_cannot_tell():
    advice = advise(columns(with_spikes(STEADY)))
    assert summary(advice) == ("spikes", (2.0, 1.0, 0.34))
    assert advice.proposal == "The level of the norms is steady. To clip only spikes: max_norm = 2"
    assert said(advice, "The loss was not recorded, so this cannot tell")
    unsure = advise(columns(np.linspace(1.0, 2.8, 300)))
    assert unsure.state == "level"
    assert "may be too long" in unsure.proposal
    assert said(unsure, "The loss was not recorded")
    assert unsure.try_values[0] < 1 < 2.8 < unsure.try_values[-1]


def test_a_level_that_is_too_high():
    advice = advise(columns(np.geomspace(1.0, 3.0, 300), losses=RISING))
    assert summary(advice) == ("level", (0.35, 0.11, 1.1))
    assert advice.proposal.startswith("The usual step is too long. Clip every step: try max_norm = 0.35, then 0.11")
    steady = advise(columns(STEADY, losses=RISING))
    assert (steady.state, steady.try_values) == ("level", (0.34, 0.1, 1.0))
    assert steady.proposal.startswith("The usual step is too long. Lower the learning rate, or clip")


def test_a_loss_far_above_its_start_asks_for_less():
    assert advise(columns(np.geomspace(1.0, 9.0, 300), losses=10 * RISING - 18)).try_values == (0.11, 0.036, 0.36)


def test_a_level_that_rises_while_the_loss_falls():
    advice = advise(columns(np.geomspace(1.0, 4.0, 300), losses=FALLING))
    assert summary(advice) == ("level", (2.9, 5.7, 0.95))
    assert advice.proposal.startswith("The level of the norms is rising. Stop it there: try max_norm = 2.9")


def test_a_level_that_falls_is_not_clipped_at_its_start():
    advice = advise(columns(np.geomspace(3.0, 0.5, 300), losses=FALLING))
    assert advice.state == "spikes"
    assert 2.8 < advice.max_norm <= 3.0
    assert said(advice, "The level fell")
    vanishing = advise(columns(np.geomspace(3.0, 1e-9, 300), losses=FALLING))
    assert vanishing.max_norm > 1


@pytest.mark.parametrize("losses", [FALLING, None])
def test_nearly_all_steps_clipped_is_left(losses):
    advice = advise(columns(with_spikes(13 * STEADY), 1.0, losses))
    assert summary(advice) == ("leave", (1.0,))
    assert advice.max_norm == 1.0
    assert str(advice).startswith("Leave max_norm at 1.\n")
    assert said(advice, "clipped 100.0% of the steps that were no spikes")
    assert advice.candidates[0].name == "in use"


def test_the_threshold_in_use_keeps_all_its_digits():
    assert advise(columns(STEADY, 0.123456, FALLING)).try_values == (0.123456,)


def test_all_clipped_and_no_progress_has_both_directions():
    advice = advise(columns(STEADY, 0.1, np.tile([2.3, 2.31], 150)))
    assert summary(advice) == ("leave", (0.1, 0.3, 0.034))
    assert said(advice, "The loss did not move")


def test_all_clipped_and_rising_goes_below_the_threshold():
    assert summary(advise(columns(STEADY, 0.3, RISING))) == ("level", (0.1, 0.03, 0.01))


def test_a_guard_that_works_is_left_and_one_far_above_is_not():
    assert summary(advise(columns(with_spikes(STEADY), 5.0, FALLING))) == ("leave", (5.0,))
    advice = advise(columns(with_spikes(STEADY), 20.0, FALLING))
    assert summary(advice) == ("spikes", (2.0, 1.0, 0.34))
    assert [one.max_norm for one in advice.candidates if one.name == "in use"] == [20.0]


def test_a_threshold_that_moves_is_left():
    moving = np.r_[math.inf, 2.0 * STEADY[:-1]]
    advice = advise(columns(STEADY, moving, FALLING))
    assert (advice.state, advice.max_norm) == ("leave", 2.2)
    assert advice.proposal == "Leave the threshold that moves as it is; its last value was 2.2."
    assert advise(columns(STEADY, moving, RISING)).state == "level"


def test_a_threshold_that_ends_at_infinity_is_not_in_use():
    assert advise(columns(STEADY, np.r_[np.full(299, 2.0), math.inf], FALLING)).try_values == (2.0, 1.0, 0.34)


@pytest.mark.parametrize("max_norm", [math.inf, 1.0, 0.0, -1.0, math.nan, 5e-324, 1e308])
@pytest.mark.parametrize("losses", [None, np.full(300, math.inf), np.linspace(8e307, -8e307, 300), np.zeros(300)])
def test_whatever_is_recorded_values_are_numbers_to_try(max_norm, losses):
    draws = np.random.default_rng(1)
    for norms in (
        np.exp(9 * draws.normal(size=300)),
        np.full(300, 5e-324),
        np.full(300, 1e308),
        np.r_[1.0, [np.nan] * 299],
    ):
        advice = advise(columns(norms, max_norm, losses))
        assert advice.max_norm == advice.try_values[0]
        assert all(0 < value < math.inf for value in advice.try_values)
        assert str(advice).startswith(advice.proposal)


def test_one_bad_step_that_ended_a_good_run():
    norms, losses = STEADY.copy(), np.where(np.arange(300) < 150, FALLING, 9.0)
    norms[150] = 1000.0
    advice = advise(columns(norms, losses=losses))
    assert summary(advice) == ("spikes", (2.0, 1.0, 0.34))
    assert advice.proposal == "One bad step ended the run. To clip only spikes: max_norm = 2"
    assert said(advice, "Until step 151 the level was steady")
    norms[150:] = math.nan
    spoiled = advise(columns(norms, losses=FALLING))
    assert spoiled.proposal.startswith('One bad step ended the run. Pass nonfinite="drop"')
    assert summary(spoiled) == ("spikes", (2.0, 1.0, 0.34))


def test_a_bad_step_does_not_change_a_threshold_that_works():
    norms = STEADY.copy()
    norms[250:] = math.nan
    advice = advise(columns(norms, 0.1, FALLING))
    assert summary(advice) == ("leave", (0.1,))
    assert advice.proposal == 'One bad step ended the run. Pass nonfinite="drop". Leave max_norm at 0.1.'
    assert advice.candidates[0].name == "in use"


def test_a_spike_that_was_clipped_or_skipped_did_not_end_the_run():
    norms, losses = STEADY.copy(), np.where(np.arange(300) < 200, FALLING, 9.0)
    norms[100] = 50.0
    assert advise(columns(norms, losses=losses)).proposal.startswith("One bad step ended the run")
    for given in ({"max_norm": 2.0}, {"max_norm": 0.5}, {"skipped": (101,)}):
        advice = advise(columns(norms, losses=losses, **given))
        assert advice.state == "level"
        assert advice.max_norm < min(1.0, given.get("max_norm", 1.0))


def test_a_run_that_explodes_into_nan():
    for before in (8, 40):
        norms = np.r_[np.geomspace(1.0, 1e6, before), np.full(50, math.nan)]
        advice = advise(columns(norms))
        assert advice.state == "level"
        assert advice.try_values[0] < 1
        assert said(advice, "50 steps with a norm that is NaN or infinite were not skipped")


def test_a_network_that_died_is_measured_before_its_death():
    norms = np.r_[np.full(8, 1.0), np.full(292, 1e-12)]
    advice = advise(columns(norms, losses=np.full(300, 2.3)))
    assert summary(advice) == ("level", (0.34, 0.1, 1.0))


def test_the_policy_is_said_as_far_as_it_is_known():
    norms = with_spikes(STEADY, 100)
    norms[[10, 20]] = math.nan
    advice = advise(columns(norms, 5.0, FALLING, skipped={11, 100, 200, 300}))
    assert said(advice, "3 steps with a finite norm were skipped: above skip_above")
    assert said(advice, "1 step with a norm that is NaN or infinite was skipped, as nonfinite=")
    assert said(advice, "1 step with a norm that is NaN or infinite was not skipped")
    assert not said(advise(columns(STEADY)), "drop")


def test_norms_of_zero_are_left_out():
    advice = advise(columns([5.0] * 30 + [0.0] * 90))
    assert (advice.max_norm, advice.steps) == (10.0, 30)
    assert said(advice, "90 steps with a norm of 0 were left out")


def test_a_threshold_of_zero_is_not_left():
    advice = advise(columns(STEADY, 0.0))
    assert (advice.state, advice.max_norm) == ("spikes", 2.0)


def test_norms_at_the_ends_of_the_range():
    assert advise(columns([1e308] * 50)).max_norm == 2e300
    assert 0 < advise(columns([5e-324] * 50)).max_norm <= 2e-300


@pytest.mark.parametrize("norms", [[], [1.0] * 19, [0.0] * 50, [math.nan] * 50])
def test_too_little_to_say(norms):
    advice = advise(columns(norms))
    assert (advice.state, advice.max_norm, advice.candidates, advice.try_values) == ("too few", None, (), ())
    assert str(advice).startswith("Too few steps to say: no threshold to propose.\n- This needs 20 steps")


@pytest.mark.parametrize(("number", "rounded"), [(1.21, 1.3), (1.3, 1.3), (0.0, 0.0), (987.0, 990.0), (9.91e-7, 1e-6)])
def test_rounding_goes_up(number, rounded):
    assert rounded_up(number) == rounded


@pytest.mark.parametrize("seed", [0, 1])
def test_advice_leads_a_training_to_success(seed):
    monitor = gradclip.Monitor()
    assert long_chain.train(math.inf, 0.03, seed, monitor) > 0.9
    values = monitor.advise().try_values
    assert min(long_chain.train(value, 0.03, seed) for value in values) < 0.011
    assert long_chain.train(values[0], 0.03, seed) < 0.02


@pytest.mark.parametrize("seed", [0, 1])
def test_the_advice_after_a_training_that_clips_all_is_to_leave_it(seed):
    monitor = gradclip.Monitor()
    assert long_chain.train(0.03, 0.03, seed, monitor) < 0.02
    assert summary(monitor.advise()) == ("leave", (0.03,))


@pytest.mark.parametrize("rate", [0.001, 0.003])
def test_the_advice_on_a_stable_training_does_not_hurt(rate):
    monitor = gradclip.Monitor()
    free = long_chain.train(math.inf, rate, 0, monitor)
    advice = monitor.advise()
    assert advice.state == "spikes"
    assert long_chain.train(advice.max_norm, rate, 0) == pytest.approx(free, rel=0.02)
