"""Correct loops whose steps are unusual, as with a closure or GradScaler: a guard says nothing."""

import math

import pytest
import torch

import gradclip
from gradclip import clip_at_step
from gradclip.integrations.torch import clip_in_backward
from loops import CLIPS, STEPS, descent, loss_of, network, trained


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(params=CLIPS)
def clip(request):
    return CLIPS[request.param]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_closure(clip, make):
    model = network()
    optimizer = make(model.parameters(), lr=1e-4)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        clip(model.parameters(), 1.0)
        return loss

    trained(optimizer, lambda: optimizer.step(closure))


@pytest.mark.parametrize("fused", [False, True])
def test_scaler(clip, fused):
    model = network()
    optimizer = descent(model, make=torch.optim.AdamW, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)

    def once():
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        clip(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    assert trained(optimizer, once).norm == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_scaler_with_the_threshold_scaled_too(clip, fused):
    model = network()
    optimizer = descent(model, make=torch.optim.SGD, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def once():
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        clip(model.parameters(), scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()

    assert trained(optimizer, once).norm == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_scaler_that_skips_now_and_then(clip, fused):
    model = network()
    optimizer = descent(model, make=torch.optim.SGD, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    broken = [turn in (0, 1, 2, 9, 10, 18) for turn in range(30)]  # at its start a scale is often too large
    left = list(broken)

    def once():
        optimizer.zero_grad()
        scaler.scale(loss_of(model) * (math.inf if left.pop(0) else 1.0)).backward()
        scaler.unscale_(optimizer)
        clip(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    watched = trained(optimizer, once, 1.0, 30, looks=9 if fused else 8)
    assert watched.steps == 30 - (not fused) * sum(broken)
    assert watched.num_skipped == 3  # those at the start do not count


def test_the_first_steps_that_a_scaler_skips_do_not_count():
    model = network()
    optimizer = descent(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    watched = gradclip.guard(optimizer, 1.0, stop_after=2, on_mistake="raise")
    for _ in range(40):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, scale=1e10)).backward()
        scaler.unscale_(optimizer)
        gradclip.clip_grad_norm_(model.parameters(), 1e-3 * math.inf)
        scaler.step(optimizer)
        scaler.update()
    assert watched.steps < 38
    watched.remove()


@pytest.mark.parametrize("first", ["guard", "clip_at_step"])
@pytest.mark.parametrize("max_norm", [1.0, gradclip.AdaptiveThreshold, "handle"])
@pytest.mark.parametrize("scaled", [False, True])
def test_fused_steps_that_clip(first, max_norm, scaled):
    model = network()
    optimizer = descent(model, make=torch.optim.AdamW, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    adaptive = gradclip.AdaptiveThreshold() if max_norm is gradclip.AdaptiveThreshold else 1.0
    if first == "guard" and max_norm != "handle":
        watched = gradclip.guard(optimizer, adaptive, every=4)
        handle = clip_at_step(optimizer, adaptive, fused=True)
    else:
        handle = clip_at_step(optimizer, adaptive, fused=True)
        watched = gradclip.guard(optimizer, handle if max_norm == "handle" else adaptive, every=4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()
    watched.remove()
    assert watched.reports == []
    assert watched.norm <= (1.0001 if adaptive == 1.0 else handle.norm * 1.0001)
    assert handle.norm > 2.0


def test_adaptive_threshold(clip):
    if clip is not gradclip.clip_grad_norm_:
        return
    model, max_norm = network(), gradclip.AdaptiveThreshold()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        clip(model.parameters(), max_norm)
        optimizer.step()

    trained(optimizer, once, max_norm, 30, looks=9)
    assert max_norm.num_clipped > 0


@pytest.mark.parametrize("first", ["guard", "clip_in_backward"])
@pytest.mark.parametrize("times", [1, 3])
def test_clip_in_backward(first, times):
    model = network()
    optimizer = descent(model)
    if first == "guard":
        watched = gradclip.guard(optimizer, 1.0, every=4)
        clip_in_backward(model, 1.0)
    else:
        clip_in_backward(model, 1.0)
        watched = gradclip.guard(optimizer, 1.0, every=4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(times):
            loss_of(model).backward()
        optimizer.step()
    watched.remove()
    assert (watched.reports, watched.looks) == ([], 4)


class ClipsItself(torch.optim.SGD):
    """Clips in its step, as LAMB does."""

    def __init__(self, params, lr, max_grad_norm):
        super().__init__(params, lr)
        self.defaults["max_grad_norm"] = self.param_groups[0]["max_grad_norm"] = max_grad_norm

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], self.param_groups[0]["max_grad_norm"] or 1e9)
        super().step()


@pytest.mark.parametrize(("own", "kinds"), [(1.0, []), (0.5, []), (0, ["not_clipped"]), (2.0, ["not_clipped"])])
@pytest.mark.filterwarnings("ignore::gradclip.ClippingWarning")
def test_an_optimizer_that_clips_in_its_own_step(own, kinds):
    model = network()
    optimizer = ClipsItself(model.parameters(), 1e-4, own)
    watched = gradclip.guard(optimizer, 1.0, every=1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    assert [one.kind for one in watched.reports] == kinds
    watched.remove()


@pytest.mark.parametrize("fused", [False, True])
def test_a_first_step_without_gradients(fused):
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([weight], fused=fused)
    watched = gradclip.guard(optimizer, clip_at_step(optimizer, gradclip.AdaptiveThreshold()))
    for grad in (None, torch.ones(3), torch.ones(3)):
        weight.grad = grad
        optimizer.step()
    assert watched.reports == []
    watched.remove()
