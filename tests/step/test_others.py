"""Steps that clip warn of calls that have clipped the same gradients before them."""

import gc
import math
import warnings
from functools import partial

import pytest
import torch
from torch.nn import utils
from torch.nn.utils import clip_grad

import gradclip
from gradclip import clip_at_step

GRADIENT = torch.tensor([3.0, 4.0])


def nothing(_parameters):
    pass


def by_torch(parameters):
    utils.clip_grad_norm_(parameters, 2.0)


def by_gradclip(parameters):
    gradclip.clip_grad_norm_({"weight": parameters[0]}, 2.0)


def measured(parameters):
    utils.clip_grad_norm_(parameters, math.inf)


def measured_by_a_huge_threshold(parameters):
    utils.clip_grad_norm_(parameters, 1e9)


def by_value(parameters):
    utils.clip_grad_value_(parameters, 2.0)


def by_layers(parameters):
    gradclip.clip_grad_layer_norm_(parameters, 2.0)


def warned(clip, *, fused=False, closure=False, attach=clip_at_step, steps=4):
    """Train with something that happens between backward and step. Return the warnings and the norms of the steps."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    clipping, norms = attach(optimizer, 1.0), []

    def backward():
        optimizer.zero_grad()
        (weight @ GRADIENT).backward()
        clip([weight])
        return torch.zeros(())

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(steps):
            if closure:
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()
            norms.append(round(float(clipping.norm), 5))
    return [(one.category, str(one.message)) for one in seen], norms


@pytest.mark.parametrize("clip", [by_torch, by_gradclip])
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_call_before_the_step_is_told_of_once(clip, closure, fused):
    ((category, message),), norms = warned(clip, fused=fused, closure=closure)
    assert category is gradclip.ClippingWarning
    assert message.startswith("clip_grad_norm_ has clipped these gradients to 2 before the step clips them")
    assert "max_grad_norm=0.0" in message
    assert norms == [2.0] * 4


@pytest.mark.parametrize(
    ("clip", "norm"),
    [(nothing, 5.0), (measured, 5.0), (measured_by_a_huge_threshold, 5.0), (by_value, 8**0.5), (by_layers, 2.0)],
    ids=lambda one: getattr(one, "__name__", one),
)
@pytest.mark.parametrize("fused", [False, True])
def test_what_may_be_meant_is_not_told_of(clip, norm, fused):
    assert warned(clip, fused=fused) == ([], [round(norm, 5)] * 4)


def test_a_fused_step_that_clips_tells_of_it_too():
    ((_, message),), _ = warned(by_torch, fused=True, attach=partial(clip_at_step, fused=True))
    assert message.startswith("clip_grad_norm_ has clipped these gradients to 2")


def test_a_call_for_some_of_the_parameters_may_be_meant():
    one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.SGD([one, other], lr=1.0)
    clipping = clip_at_step(optimizer, 1.0)
    one.grad, other.grad = GRADIENT.clone(), GRADIENT.clone()
    utils.clip_grad_norm_([one], 2.0)
    optimizer.step()
    assert float(clipping.norm) == pytest.approx(29**0.5)


@pytest.mark.after_error
@pytest.mark.filterwarnings("error::gradclip.ClippingWarning")
def test_a_warning_that_is_an_error_changes_nothing():
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = GRADIENT.clone()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    clipping = clip_at_step(optimizer, 1.0)
    utils.clip_grad_norm_([weight], 5.0)
    before = weight.grad.clone()
    with pytest.raises(gradclip.ClippingWarning):
        optimizer.step()
    assert weight.tolist() == [0.0, 0.0]
    assert torch.equal(weight.grad, before)
    optimizer.step()
    assert float(clipping.norm) == pytest.approx(5.0)


def test_torchs_functions_are_its_own_again_after_two_steps_and_after_remove():
    gc.collect()  # optimizers of other tests, which have not stepped twice
    before = clip_grad._clip_grads_with_norm_, utils.clip_grad_value_
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = GRADIENT.clone()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    clip_at_step(optimizer, 1.0).remove()
    assert (clip_grad._clip_grads_with_norm_, utils.clip_grad_value_) == before
    clip_at_step(optimizer, 1.0)
    optimizer.step()
    assert clip_grad._clip_grads_with_norm_ is not before[0]
    optimizer.step()
    assert (clip_grad._clip_grads_with_norm_, utils.clip_grad_value_) == before


class ClipsItself(torch.optim.Optimizer):
    """Clips in its step, as LAMB does."""

    def __init__(self, params, max_grad_norm=1.0):
        super().__init__(params, {"lr": 1.0, "max_grad_norm": max_grad_norm})

    def step(self, closure=None):
        for group in self.param_groups:
            norm = utils.get_total_norm([p.grad for p in group["params"]])
            for p in group["params"]:
                p.data -= p.grad * min(1.0, (group["max_grad_norm"] or math.inf) / norm)


def told_of_own(own, ours, **group):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = ClipsItself([{"params": [weight], **group}], own)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        clip_at_step(optimizer, ours)
    weight.grad = GRADIENT.clone()
    optimizer.step()
    return [str(one.message) for one in seen], weight.detach().norm().item(), {one.filename for one in seen}


@pytest.mark.parametrize(
    ("own", "ours", "group"),
    [
        (1.0, 2.0, {}),
        (1.0, gradclip.AdaptiveThreshold(), {}),
        (3, 2.0, {"max_grad_norm": 1}),
        (1.0, 0.5, {"max_norm": 2.0}),
    ],
)
def test_an_optimizer_that_clips_to_less_is_told_of(own, ours, group):
    (message,), length, files = told_of_own(own, ours, **group)
    assert message.startswith("ClipsItself clips its gradients itself, to 1: 'max_grad_norm' in its parameter groups.")
    assert length == pytest.approx(1.0)
    assert files == {__file__}


@pytest.mark.parametrize("own", [2.0, 5.0, math.inf, None, 0, 0.0])
def test_an_optimizer_that_clips_to_no_less_is_not_told_of(own):
    messages, length, _ = told_of_own(own, 2.0)
    assert messages == []
    assert length == pytest.approx(2.0)


def test_the_clipping_of_another_step_is_not_taken_for_it():
    weight = torch.nn.Parameter(torch.zeros(2))
    one, other = (torch.optim.SGD([weight], lr=1.0) for _ in range(2))
    for optimizer in (one, other):
        clip_at_step(optimizer, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for optimizer in (one, other) * 3:
            weight.grad = torch.tensor([3.0, 4.0])
            optimizer.step()
