"""Clipping that an engine does itself: the threshold before a step, and what is made of the norm after it."""

import math

import pytest
import torch

import gradclip
from gradclip._src.step.engine import EngineClipping


def following(max_norm, **settings):
    return EngineClipping(object(), "The engine", max_norm, settings.pop("monitor", None), **settings)


def twice_the_median(**settings):
    return gradclip.AdaptiveThreshold(gradclip.QuantileRule(factor=2.0), **settings)


def step(clipping, norm, skipped=False):
    threshold = clipping._next_threshold()
    clipping._stepped(norm, threshold, skipped=skipped)
    return threshold


def test_the_threshold_follows_the_norms():
    clipping = following(twice_the_median())
    assert [step(clipping, norm) for norm in (3.0, torch.tensor(4.0), torch.tensor([5.0]), 100.0)] == [
        math.inf,
        6.0,
        6.0,
        8.0,
    ]
    assert clipping.norm == 100.0
    assert (clipping.max_norm.steps, clipping.max_norm.num_clipped, clipping.max_norm.num_skipped) == (4, 1, 0)
    assert (clipping.max_norm.norm, clipping.max_norm.max_norm) == (100.0, 8.0)


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0, torch.tensor(-1.0), torch.tensor(math.nan)])
@pytest.mark.parametrize("skipped", [False, True])
def test_a_norm_that_is_not_finite_is_not_followed(norm, skipped):
    monitor = gradclip.Monitor()
    clipping = following(twice_the_median(), monitor=monitor)
    assert [step(clipping, 3.0), step(clipping, norm, skipped), step(clipping, 3.0)] == [math.inf, 6.0, 6.0]
    assert monitor.counts == (3, 0, int(skipped), 1)
    assert (clipping.max_norm.steps, clipping.max_norm.num_skipped) == (3, int(skipped))


def test_a_norm_below_zero_is_shown_as_nan():
    clipping = following(1.0)
    step(clipping, -1.0)
    assert math.isnan(clipping.norm)


def test_an_engine_that_skips_spikes():
    monitor = gradclip.Monitor()
    clipping = following(twice_the_median(skip_above=4.0), monitor=monitor, skips=True)
    for norm, skipped in ((1.0, False), (1.0, False), (8.0, False), (8.5, True)):
        step(clipping, norm, skipped)
    assert (clipping.max_norm.num_clipped, clipping.max_norm.num_skipped, clipping._skip_above) == (1, 1, 4.0)
    assert monitor.counts == (4, 1, 1, 0)


def test_a_number_is_assigned():
    clipping = following(2)
    assert (step(clipping, 5.0), clipping.max_norm, clipping._skip_above) == (2.0, 2.0, math.inf)
    clipping.max_norm = torch.tensor(3.0)
    assert step(clipping, 5.0) == 3.0


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (0, ValueError, "max_norm must be above 0, got 0.0: The engine takes 0 to mean that nothing is clipped"),
        (-1.0, ValueError, "must not be negative"),
        (math.nan, ValueError, "must not be negative or NaN"),
        ("1", TypeError, "max_norm must be"),
        (gradclip.QuantileRule(), TypeError, "max_norm must be"),
        (gradclip.AdaptiveThreshold(skip_above=4.0), ValueError, "The engine cannot skip steps with a large norm"),
    ],
)
def test_thresholds_that_are_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        following(wrong)
    clipping = following(2.0)
    with pytest.raises(error, match=message):
        clipping.max_norm = wrong
    assert clipping.max_norm == 2.0


def test_an_adaptive_threshold_of_another_order_is_refused():
    other = gradclip.AdaptiveThreshold()
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    gradclip.clip_grad_norm_([parameter], other, ord=1)
    with pytest.raises(ValueError, match=r"has observed norms of ord=1\.0, got ord=2\.0"):
        following(other)


def test_an_adaptive_threshold_of_zero_is_an_error_at_the_step():
    clipping = following(gradclip.AdaptiveThreshold(gradclip.QuantileRule(upper=0.0)))
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        clipping._next_threshold()


def test_what_is_no_monitor_is_refused():
    with pytest.raises(TypeError, match=r"monitor must be a gradclip\.Monitor"):
        following(1.0, monitor=gradclip.Monitor)


def test_a_state_goes_on_to_the_last_bit():
    norms = torch.rand(50, generator=torch.Generator().manual_seed(0)).exp().tolist()
    at_once, before, after = (following(gradclip.AdaptiveThreshold()) for _ in range(3))
    expected = [step(at_once, norm) for norm in norms]
    for norm in norms[:20]:
        step(before, norm)
    after.load_state_dict(before.state_dict())
    assert after.norm == norms[19]
    assert [step(after, norm) for norm in norms[20:]] == expected[20:]


def test_the_state_of_a_number_holds_the_norm_alone():
    clipping, other = following(2.0), following(3.0)
    step(clipping, 5.0)
    other.load_state_dict(clipping.state_dict())
    assert (other.norm, other.max_norm) == (5.0, 3.0)


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "the state has norm and max_norm; got nothing"),
        ({"norm": 1.0}, "got norm. Pass the result of state_dict"),
        ({"norm": 1.0, "max_norm": None}, "that of a fixed threshold, but max_norm is an AdaptiveThreshold"),
    ],
)
def test_other_states_are_refused(state, message):
    clipping = following(gradclip.AdaptiveThreshold())
    with pytest.raises(ValueError, match=message):
        clipping.load_state_dict(state)
    assert (clipping.norm, clipping.max_norm.steps) == (None, 0)


def test_the_state_of_an_adaptive_threshold_is_refused_by_a_number():
    with pytest.raises(ValueError, match="that of an AdaptiveThreshold, but max_norm is a number"):
        following(1.0).load_state_dict(following(gradclip.AdaptiveThreshold()).state_dict())


def test_it_is_undone_once():
    undone = []
    clipping = following(1.0)._undone_by(lambda: undone.append(1))
    clipping.remove()
    clipping.remove()
    assert undone == [1]
