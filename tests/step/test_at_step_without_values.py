"""Steps of tensors that have no values, by which memory is estimated: nothing is read from them."""

import math
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gradclip
from gradclip import clip_at_step

MAX_NORMS = {"a number": lambda: 1.0, "adaptive": gradclip.AdaptiveThreshold}
MAX_NORMS["skips"] = lambda: gradclip.AdaptiveThreshold(skip_above=4.0)
FOLD = partial(clip_at_step, fused=True)
WAYS = {"at step": (clip_at_step, False), "at fused step": (clip_at_step, True), "folded": (FOLD, True)}


def train(model, optimizer):
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("nonfinite", ["propagate", "skip", "zero"])
@pytest.mark.parametrize("max_norm", MAX_NORMS.values(), ids=MAX_NORMS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_step_clips(way, max_norm, nonfinite):
    clip, fused = way
    if clip is FOLD and nonfinite == "zero":
        nonfinite = "propagate"
    with FakeTensorMode():
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        clipping = clip(optimizer, max_norm(), nonfinite=nonfinite)
        train(model, optimizer)
        assert {one.shape for one in clipping.numbers().values()} == {()}
    assert clipping.steps == 3
    clipping.remove()


def test_a_step_clips_groups_on_their_own():
    with FakeTensorMode():
        model = torch.nn.Linear(3, 2)
        groups = [{"params": [model.weight], "max_norm": 1.0}, {"params": [model.bias], "max_norm": math.inf}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        clipping = clip_at_step(optimizer, 1.0, nonfinite="skip")
        train(model, optimizer)
    assert clipping.steps == 3
    clipping.remove()


def test_a_guard_looks_at_none():
    with FakeTensorMode():
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = gradclip.guard(optimizer, 1.0)
        train(model, optimizer)
    assert (guard.steps, guard.looks, guard.reports) == (3, 0, [])
    guard.remove()
