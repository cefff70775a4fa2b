"""Correct loops in which groups or names have thresholds of their own, or clipping happens before the step itself."""

import math
import warnings

import pytest
import torch

import gradclip
from gradclip import clip_at_step
from loops import descent, loss_of, network


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def trained(model, optimizer, guard, clip=None, scale=1.0):
    with warnings.catch_warnings():
        warnings.simplefilter("error", gradclip.ClippingWarning)
        for _ in range(6):
            optimizer.zero_grad()
            (scale * loss_of(model)).backward()
            if clip is not None:
                clip()
            optimizer.step()
    guard.remove()
    assert guard.reports == []
    assert guard.looks >= 5
    return guard


def grouped(model, own):
    first, *rest = model.parameters()
    groups = [{"params": [first]}, {"params": rest, "max_norm": own}]
    return torch.optim.SGD(groups, lr=0.0)


@pytest.mark.parametrize("first", ["guard", "clip_at_step"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [1.0, gradclip.AdaptiveThreshold])
@pytest.mark.parametrize("told", ["threshold", "handle", "nothing"])
def test_clip_at_step(first, fused, max_norm, told):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    max_norm = max_norm() if isinstance(max_norm, type) else max_norm
    if first == "guard":
        guard = gradclip.guard(optimizer, None if told == "nothing" else max_norm, every=1)
        clip_at_step(optimizer, max_norm)
    else:
        clipping = clip_at_step(optimizer, max_norm)
        given = {"threshold": max_norm, "handle": clipping, "nothing": None}[told]
        guard = gradclip.guard(optimizer, given, every=1)
    trained(model, optimizer, guard)


@pytest.mark.parametrize("scale", [1.0, 1e8])
@pytest.mark.parametrize("own", [2.0, None, gradclip.AdaptiveThreshold])
@pytest.mark.parametrize("told", [1.0, "handle", None])
@pytest.mark.parametrize("by_hand", [False, True])
def test_thresholds_of_groups(own, told, by_hand, scale):
    model = network()
    optimizer = grouped(model, own() if isinstance(own, type) else own)
    clipping = None if by_hand else clip_at_step(optimizer, 1e3 * scale)
    if told == "handle" and by_hand:
        told = None
    guard = gradclip.guard(optimizer, clipping if told == "handle" else told, every=1)
    clip = (lambda: gradclip.clip_grad_norm_(optimizer.param_groups, 1e3 * scale)) if by_hand else None
    trained(model, optimizer, guard, clip, scale)


def test_a_group_that_is_only_measured_may_be_large():
    """The common coefficient is not its threshold divided by the norm of all."""
    model = network()
    optimizer = grouped(model, None)
    guard = gradclip.guard(optimizer, clip_at_step(optimizer, 1.0), every=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", gradclip.ClippingWarning)
        for _ in range(3):
            for number, one in enumerate(model.parameters()):
                one.grad = torch.full_like(one, 1.0 if number == 0 else 1e9)
            optimizer.step()
    guard.remove()
    assert guard.reports == []


def test_only_thresholds_of_groups():
    model = network()
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "max_norm": 1.0}], lr=0.01)
    guard = gradclip.guard(optimizer, clip_at_step(optimizer, gradclip.AdaptiveThreshold()), every=1)
    trained(model, optimizer, guard)


@pytest.mark.parametrize("max_norm", [1.0, None, math.sqrt(5)])
@pytest.mark.parametrize("own", [2.0, None, gradclip.AdaptiveThreshold])
def test_thresholds_by_name(own, max_norm):
    model = network()
    name = next(iter(dict(model.named_parameters())))
    named = {name: 1.0, "*": own() if isinstance(own, type) else own}
    optimizer = descent(model)
    guard = gradclip.guard(optimizer, max_norm, every=1)
    trained(model, optimizer, guard, lambda: gradclip.clip_grad_norm_(model.named_parameters(), named))


def test_an_adaptive_threshold_that_has_skipped_steps_before():
    """As after a checkpoint."""
    model = network()
    optimizer = descent(model)
    max_norm = gradclip.AdaptiveThreshold(skip_above=4.0)
    weight = torch.nn.Parameter(torch.zeros(2))
    for norm in (100.0, 100.0, 1e5, 100.0):
        weight.grad = torch.tensor([0.6, 0.8]) * norm
        gradclip.clip_grad_norm_([weight], max_norm)
    assert max_norm.num_skipped == 1
    guard = gradclip.guard(optimizer, max_norm, every=1)
    trained(model, optimizer, guard, lambda: gradclip.clip_grad_norm_(model.parameters(), max_norm))
    assert guard.num_skipped == 0


# Mistakes beside such thresholds


@pytest.mark.parametrize("own", [2.0, None])
def test_a_call_for_groups_that_leaves_some_out(own):
    model = network()
    optimizer = grouped(model, own)
    guard = gradclip.guard(optimizer, 1.0, every=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gradclip.ClippingWarning)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model).backward()
            gradclip.clip_grad_norm_(optimizer.param_groups[1:], 1.0)
            optimizer.step()
    guard.remove()
    assert [one.kind for one in guard.reports] == ["other_parameters"]


def test_names_after_the_step():
    model = network()
    optimizer = descent(model)
    guard = gradclip.guard(optimizer, 1.0, every=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gradclip.ClippingWarning)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            gradclip.clip_grad_norm_(model.named_parameters(), {"*": 1.0})
    guard.remove()
    assert [one.kind for one in guard.reports] == ["after_step"]


def test_the_first_step_that_a_known_adaptive_threshold_skips():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    max_norm = gradclip.AdaptiveThreshold(skip_above=4.0)
    for norm in (1.0, 1.0, 100.0, 1.0):
        weight.grad = torch.tensor([0.6, 0.8]) * norm
        gradclip.clip_grad_norm_([weight], max_norm)
    guard = gradclip.guard(optimizer, max_norm, every=1)
    weight.grad = torch.tensor([0.6, 0.8]) * 100.0
    gradclip.clip_grad_norm_([weight], max_norm)
    with pytest.warns(gradclip.ClippingWarning, match="A step was skipped"):
        optimizer.step()
    guard.remove()
    assert guard.num_skipped == 1


def test_thresholds_that_follow_each_layer_are_no_bound_for_all():
    model, max_norm = network(), gradclip.AdaptiveThreshold()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = gradclip.guard(optimizer, max_norm, every=1)
    trained(model, optimizer, guard, lambda: gradclip.clip_grad_layer_norm_(model.parameters(), max_norm))
    assert (max_norm.steps, guard.num_skipped) == (6, 0)
