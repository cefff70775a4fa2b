"""Mixed precision: `GradScaler` unscales, then gradients are clipped. Steps with infinities are skipped."""

import math

import numpy as np
import pytest
import torch

import gradclip
from gradclip import clip_at_step
from on_gpu import DEVICE, ON, batches, check_weights, loss_of, network, numbers, on_host, trained_on_host

pytestmark = pytest.mark.gpu
KINDS = ("plain", "foreach", "fused")


def scaler_of(scale=1024.0):
    return torch.amp.GradScaler(DEVICE.type, init_scale=scale)


def descent(kind, momentum=0.0):
    weight = torch.nn.Parameter(torch.zeros(2, device=DEVICE))
    settings = {} if kind == "plain" else {kind: True}
    return weight, torch.optim.SGD([weight], lr=1.0, momentum=momentum, **settings)


def backward(scaler, weight, values):
    weight.grad = None
    scaler.scale((weight * values).sum()).backward()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 1024.0, 65536.0])
def test_unscale_then_clip(kind, scale):
    weight, optimizer = descent(kind)
    scaler = scaler_of(scale)
    backward(scaler, weight, numbers(3.0, 4.0))
    scaler.unscale_(optimizer)
    with ON.waiting_is_an_error():
        norm = gradclip.clip_grad_norm_([weight], 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert float(norm) == 5.0
    np.testing.assert_allclose(on_host([weight])[0], [-0.6, -0.8], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("policy", ["propagate", "drop", "zero"])
def test_a_skipped_step(kind, bad, policy):
    """The scaler saw the infinity before clipping, and skips the step whatever clipping makes of it."""
    weight, optimizer = descent(kind, momentum=0.9)
    scaler = scaler_of()
    for values in ((3.0, 4.0), (3.0, bad), (6.0, 8.0)):
        backward(scaler, weight, numbers(*values))
        scaler.unscale_(optimizer)
        gradclip.clip_grad_norm_([weight], 1.0, nonfinite=policy)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    # (0.6, 0.8), then 1.9 times that: the momentum of the first step is 0.9 of it.
    np.testing.assert_allclose(on_host([weight])[0], [-0.6 * 2.9, -0.8 * 2.9], rtol=1e-5)


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_folded_into_a_fused_step(unscale, bad):
    weight, optimizer = descent("fused", momentum=0.9)
    clipping, scaler = clip_at_step(optimizer, 1.0), scaler_of()
    for values in ((3.0, 4.0), (3.0, bad), (6.0, 8.0)):
        backward(scaler, weight, numbers(*values))
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert float(clipping.norm) == pytest.approx(10.0, rel=1e-6)
    assert scaler.get_scale() == 512.0
    np.testing.assert_allclose(on_host([weight])[0], [-0.6 * 2.9, -0.8 * 2.9], rtol=1e-5)
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_clipped_before_a_plain_step(bad):
    weight, optimizer = descent("plain", momentum=0.9)
    clipping, scaler = clip_at_step(optimizer, 1.0), scaler_of()
    for values in ((3.0, 4.0), (3.0, bad), (6.0, 8.0)):
        backward(scaler, weight, numbers(*values))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert float(clipping.norm) == pytest.approx(10.0, rel=1e-6)
    np.testing.assert_allclose(on_host([weight])[0], [-0.6 * 2.9, -0.8 * 2.9], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("folded", [True, False])
def test_a_training(kind, folded):
    """Scales are powers of two, so weights are those without a scaler."""

    def optimizer_of(parameters, **settings):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, **settings)

    model, scaler, inputs = network(), scaler_of(), batches(6)
    optimizer = optimizer_of(model.parameters(), **({} if kind == "plain" else {kind: True}))
    clipping = clip_at_step(optimizer, 0.7) if folded else None
    for x in inputs:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x)).backward()
        scaler.unscale_(optimizer)
        norm = None if folded else gradclip.clip_grad_norm_(model.parameters(), 0.7)
        scaler.step(optimizer)
        scaler.update()
        norm = clipping.norm if folded else norm
    wanted, norms = trained_on_host(optimizer_of, 0.7, inputs)
    assert float(norm) == pytest.approx(norms[-1], rel=1e-4)
    assert max(norms) > 0.7
    check_weights(model, wanted)


def test_autocast_to_half_types():
    """Activations are in float16 (bfloat16 on the CPU), gradients of the weights in float32."""
    model, scaler = network(), scaler_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with torch.autocast(DEVICE.type, dtype=ON.half):
        loss = loss_of(model, batches(1)[0]).float()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = gradclip.clip_grad_norm_(model.parameters(), 0.25)
    _, (wanted,) = trained_on_host(lambda p: torch.optim.SGD(p, lr=0.05), 0.25, batches(1))
    assert float(norm) == pytest.approx(wanted, rel=0.03)
    assert float(gradclip.grad_norm(model.parameters())) == pytest.approx(0.25, rel=1e-5)
