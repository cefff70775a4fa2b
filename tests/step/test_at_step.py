"""Clipping right before the steps of any optimizer: what the optimizer gets, and when a step is skipped."""

import copy
import math

import pytest
import torch

import gradclip
from gradclip import clip_at_step
from gradclip._src.step.fold import FusedClipping
from plain_descent import plain

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.1),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.1),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
}


def parameters():
    return [torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (4, 2))]


def give(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = scale * torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_are_those_after_clipping_by_hand(make):
    ours, theirs = parameters(), parameters()
    one, other = make(ours), make(theirs)
    clipping = clip_at_step(one, 1.0)
    for seed, scale in enumerate([1.0, 1e-4, 100.0, 0.01]):
        give(ours, seed, scale)
        give(theirs, seed, scale)
        norm = gradclip.clip_grad_norm_(theirs, 1.0)
        one.step()
        other.step()
        assert torch.equal(clipping.norm, norm)
        for mine, by_hand in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, by_hand, rtol=1e-6, atol=1e-6)
    assert clipping.steps == 4


@pytest.mark.parametrize(("ord", "expected"), [(1, (-3 / 7, -4 / 7)), (2, (-0.6, -0.8)), (math.inf, (-0.75, -1.0))])
@pytest.mark.parametrize("fused", [False, True])
def test_the_order_of_the_norm(ord, expected, fused):
    weight, optimizer = plain(fused=fused)
    clip_at_step(optimizer, 1.0, ord=ord)
    optimizer.step()
    assert weight.tolist() == pytest.approx(expected)


def test_a_fused_optimizer_clips_within_its_step():
    assert isinstance(clip_at_step(plain(fused=True)[1], 1.0), FusedClipping)
    assert not isinstance(clip_at_step(plain()[1], 1.0), FusedClipping)


@pytest.mark.parametrize("arguments", [{"nonfinite": "zero"}, {"max_norm": 2.0**-60}], ids=str)
def test_a_fused_optimizer_that_cannot_divide_by_it_gets_clipped_gradients(arguments):
    weight, optimizer = plain((3.0, math.inf) if "nonfinite" in arguments else (3.0, 4.0), fused=True)
    clipping = clip_at_step(optimizer, **{"max_norm": 1.0, **arguments})
    assert not isinstance(clipping, FusedClipping)
    optimizer.step()
    small = torch.tensor([-0.6, -0.8]) * 2.0**-60
    torch.testing.assert_close(weight.detach(), small if "max_norm" in arguments else torch.tensor([-1.0, 0.0]))


def test_settings_of_the_optimizer_are_not_taken_for_thresholds():
    """Several optimizers have settings that would be refused as keys of a parameter group elsewhere."""

    class Percentile(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=1.0)
            self.defaults["percentile_clipping"] = 100
            self.param_groups[0]["percentile_clipping"] = 100

    weight, _ = plain()
    optimizer = Percentile([weight])
    clip_at_step(optimizer, 1.0)
    optimizer.step()
    assert weight.tolist() == pytest.approx([-0.6, -0.8])
    optimizer.param_groups[0]["max_grad_norm"] = 1.0
    with pytest.raises(ValueError, match="'max_grad_norm', which gradclip does not read"):
        optimizer.step()


@pytest.mark.after_error
def test_names_of_parameters_are_in_errors():
    weight, _ = plain((3.0, math.nan))
    optimizer = torch.optim.SGD([("body.weight", weight)], lr=1.0)
    clip_at_step(optimizer, 1.0, nonfinite="raise")
    with pytest.raises(FloatingPointError, match=r"body\.weight\.grad: 1 NaN"):
        optimizer.step()
    assert weight.tolist() == [0.0, 0.0]


def test_without_any_gradient_nothing_warns():
    weight, optimizer = plain()
    weight.grad = None
    clipping = clip_at_step(optimizer, gradclip.AdaptiveThreshold(), monitor=(monitor := gradclip.Monitor()))
    optimizer.step()
    assert clipping.norm == 0.0
    assert (clipping.steps, clipping.max_norm.steps, monitor.steps) == (0, 0, 0)


# Skipped steps


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("why", ["nonfinite", "spike"])
def test_a_skipped_step_is_as_if_it_had_not_been(make, why):
    ours, theirs = parameters(), parameters()
    one, other = make(ours), make(theirs)
    threshold = 1e6 if why == "nonfinite" else gradclip.AdaptiveThreshold(skip_above=4.0)
    clipping = clip_at_step(one, threshold, nonfinite="skip" if why == "nonfinite" else "propagate")
    for seed in range(6):
        skipped = seed in (2, 4)
        give(ours, seed, 1000.0 if skipped and why == "spike" else 1.0)
        if skipped and why == "nonfinite":
            ours[1].grad[0, 0] = math.nan
        before = copy.deepcopy((ours, one.state_dict()["state"]))
        one.step()
        if skipped:
            torch.testing.assert_close((ours, one.state_dict()["state"]), before, rtol=0, atol=0)
            continue
        give(theirs, seed)
        if why == "spike":
            gradclip.clip_grad_norm_(theirs, clipping.threshold)
        other.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    numbers = clipping.numbers()
    assert numbers["grad_norm"] == numbers["grad_norm_clipped"]


def test_a_finite_norm_beyond_float32_is_no_reason_to_skip():
    weight, optimizer = plain((3e38, 3e38))
    clip_at_step(optimizer, 1.0, nonfinite="skip")
    optimizer.step()
    assert weight.tolist() == pytest.approx([-math.sqrt(0.5)] * 2)


def test_nan_without_a_policy_is_seen():
    weight, optimizer = plain((math.nan, 1.0))
    clip_at_step(optimizer, 1.0)
    optimizer.step()
    assert torch.isnan(weight).all()
