"""Correct loops, of many kinds: a guard says nothing."""

import math

import pytest
import torch

import gradclip
from loops import CLIPS, STEPS, descent, loss_of, network, trained


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(params=CLIPS)
def clip(request):
    return CLIPS[request.param]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_plain(clip, dtype, set_to_none):
    model = network(dtype)
    optimizer = descent(model)

    def once():
        loss_of(model).backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    assert trained(optimizer, once).norm == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("max_norm", [1.0, 1e9, math.inf, None])
def test_any_threshold(clip, max_norm):
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        clip(model.parameters(), math.inf if max_norm is None else max_norm)
        optimizer.step()

    trained(optimizer, once, max_norm)


def test_a_loop_that_measures_after_the_step_too(clip):
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        clip(model.parameters(), math.inf)

    trained(optimizer, once)


@pytest.mark.parametrize("zero", ["before", "after", "with zeros"])
def test_accumulation(clip, zero):
    model = network()
    optimizer = descent(model)

    def once():
        if zero != "after":
            optimizer.zero_grad(set_to_none=zero == "before")
        for _ in range(4):
            (loss_of(model) / 4).backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        if zero == "after":
            optimizer.zero_grad()

    trained(optimizer, once)


def test_a_running_mean_of_micro_batches(clip):
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        for before in range(4):
            for one in model.parameters():
                if one.grad is not None:
                    one.grad.mul_(before / (before + 1))
            (loss_of(model) / (before + 1)).backward()
        clip(model.parameters(), 1.0)
        optimizer.step()

    trained(optimizer, once)


def test_tasks_clipped_one_by_one_then_added(clip):
    model = network()
    optimizer = descent(model)

    def once():
        total = [torch.zeros_like(one) for one in model.parameters()]
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            clip(model.parameters(), 1.0)
            for into, one in zip(total, model.parameters(), strict=True):
                into += one.grad / 3
        for into, one in zip(total, model.parameters(), strict=True):
            one.grad = into
        optimizer.step()

    trained(optimizer, once)


def test_two_passes_for_one_step(clip):
    """As sharpness-aware minimization does: the first pass moves the parameters, the second gives the gradients."""
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        clip(model.parameters(), 1.0)
        moves = [0.01 * one.grad for one in model.parameters()]
        for sign in (1, -1):
            with torch.no_grad():
                for one, move in zip(model.parameters(), moves, strict=True):
                    one.add_(move, alpha=sign)
            if sign == 1:
                optimizer.zero_grad()
                loss_of(model).backward()
        clip(model.parameters(), 1.0)
        optimizer.step()

    trained(optimizer, once)


def test_two_optimizers_of_one_loss(clip):
    model = network()
    one, other = (torch.optim.SGD(model[i].parameters(), lr=1e-4) for i in (0, 2))
    rest = torch.optim.Adam(model[4].parameters(), lr=1e-4)
    guards = [gradclip.guard(each, 1.0, every=4, on_mistake="raise") for each in (one, other, rest)]
    for _ in range(STEPS):
        for each in (one, other, rest):
            each.zero_grad()
        loss_of(model).backward()
        clip(model.parameters(), 1.0)
        for each in (one, other, rest):
            each.step()
    assert [watched.looks for watched in guards] == [4, 4, 4]
    for watched in guards:
        watched.remove()


def test_a_call_for_each_group(clip):
    model = network()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2:].parameters()}], lr=1e-4)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        for group in optimizer.param_groups:
            clip(group["params"], 0.5)
        optimizer.step()

    trained(optimizer, once)


def test_frozen_layers(clip):
    model = network()
    for one in model[2].parameters():
        one.requires_grad_(False)
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        clip([one for one in model.parameters() if one.requires_grad], 1.0)
        optimizer.step()

    trained(optimizer, once)
