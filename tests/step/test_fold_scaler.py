"""Folded clipping under GradScaler: of unscaled gradients, by the optimizer's one division."""

import math
from unittest import mock

import pytest
import torch

import gradclip
from gradclip import clip_at_step
from scaled import stepped

INPUT = torch.tensor([3.0, 4.0])


def descent(momentum=0.0):
    weight = torch.nn.Parameter(torch.zeros(2))
    return weight, torch.optim.SGD([weight], lr=1.0, momentum=momentum, fused=True)


def left(optimizer):
    return {"grad_scale", "found_inf"} & vars(optimizer).keys()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("scale", [1.0, 65536.0, 1000.0, 2.0**-20])
def test_clipped(scale, unscale):
    weight, optimizer = descent()
    clipping = clip_at_step(optimizer, 1.0, fused=True)
    stepped(torch.amp.GradScaler("cpu", init_scale=scale), weight, optimizer, unscale=unscale)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, 0.8]))
    assert clipping.norm.item() == pytest.approx(5.0, rel=1e-6)
    assert left(optimizer) == set()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_a_norm_equal_to_the_threshold_is_kept(scale, unscale):
    weight, optimizer = descent()
    clip_at_step(optimizer, 5.0, fused=True)
    stepped(torch.amp.GradScaler("cpu", init_scale=scale), weight, optimizer, unscale=unscale)
    assert weight.tolist() == [-3.0, -4.0]


@pytest.mark.parametrize("nonfinite", ["propagate", "raise", "skip"])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_scale_that_was_too_large(nonfinite, unscale, momentum):
    weight, optimizer = descent(momentum)
    clip_at_step(optimizer, 1.0, nonfinite=nonfinite, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    stepped(scaler, weight, optimizer, torch.tensor([3.0, math.inf]), unscale=unscale)
    assert weight.tolist() == [0.0, 0.0]
    assert scaler.get_scale() == 512.0
    stepped(scaler, weight, optimizer, unscale=unscale)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))
    assert left(optimizer) == set()


def test_two_devices_that_found_infinities_skip_too():
    """GradScaler adds up what the devices found, and the kernels skip for 1.0 alone."""
    weight, optimizer = descent()
    clip_at_step(optimizer, 1.0, fused=True)
    weight.grad = INPUT.clone()
    optimizer.found_inf = torch.tensor(2.0)
    optimizer.step()
    assert weight.tolist() == [0.0, 0.0]
    assert optimizer.found_inf.item() == 2.0


@pytest.mark.after_error
def test_the_scaler_is_as_it_was_after_an_error():
    weight, optimizer = descent()
    clip_at_step(optimizer, 1.0, fused=True)
    weight.grad = INPUT * 4
    optimizer.grad_scale = given = torch.tensor(4.0)
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert optimizer.grad_scale is given
    assert left(optimizer) == {"grad_scale"}


@pytest.mark.after_error
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fails", ["before the step", "in the step", "while measuring"])
def test_the_next_step_of_a_scaler_after_an_error(fails, unscale):
    """GradScaler leaves its scale in the optimizer then, and would multiply the next one by it."""
    weight, optimizer = descent()
    clipping = clip_at_step(optimizer, 1.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    (fold,) = optimizer._optimizer_step_pre_hooks.values()
    fail = mock.Mock(side_effect=KeyError)
    failing = {
        "before the step": lambda: mock.patch.object(optimizer, "_optimizer_step_pre_hooks", {0: fold, 1: fail}),
        "in the step": lambda: mock.patch("torch._fused_sgd_", side_effect=KeyError),
        "while measuring": lambda: mock.patch("gradclip._src.step.within.entered", side_effect=KeyError),
    }[fails]
    with failing(), pytest.raises(KeyError):
        stepped(scaler, weight, optimizer, unscale=unscale)
    assert left(optimizer) == set()
    scaler.update()
    clipping.max_norm = 2.5
    for _ in range(2):
        with torch.no_grad():
            weight.zero_()
        stepped(scaler, weight, optimizer, unscale=unscale)
        torch.testing.assert_close(weight.detach(), torch.tensor([-1.5, -2.0]))


@pytest.mark.after_error
def test_what_the_scaler_did_not_find_is_raised():
    """Here a hook makes it, after the scaler has looked."""
    weight, optimizer = descent()

    def spoil(*_):
        weight.grad.fill_(math.nan)

    optimizer.register_step_pre_hook(spoil)
    clip_at_step(optimizer, 1.0, nonfinite="raise", fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with pytest.raises(FloatingPointError, match="2 NaN"):
        stepped(scaler, weight, optimizer)
    assert weight.tolist() == [0.0, 0.0]


def test_a_scaler_that_is_switched_off():
    weight, optimizer = descent()
    clip_at_step(optimizer, 1.0, fused=True)
    stepped(torch.amp.GradScaler("cpu", enabled=False), weight, optimizer)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


@pytest.mark.parametrize("unscale", [False, True])
def test_a_monitor_is_told_that_the_scaler_skipped_the_step(unscale):
    weight, optimizer = descent()
    monitor = gradclip.Monitor()
    clip_at_step(optimizer, 1.0, monitor=monitor, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for values in (INPUT, torch.tensor([math.inf, 1.0]), INPUT):
        stepped(scaler, weight, optimizer, values, unscale=unscale)
    assert [(step.finite, step.skipped) for step in monitor.records] == [(True, False), (False, True), (True, False)]
