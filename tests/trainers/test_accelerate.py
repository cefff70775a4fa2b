"""Loops of accelerate, in which each step gets clipped gradients."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState

import gradclip
from gradclip import clip_at_step
from recorded import Recorded

C = 1.0
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}
EACH_OPTIMIZER = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
SCALES = ([0.05] * 3 + [6.0, 1.0, 3.0]) * 2


@pytest.fixture(autouse=True)
def own_state():
    """accelerate keeps its settings for all of a process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def batches():
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(len(SCALES), 4, 3, generator=generator) * torch.tensor(SCALES)[:, None, None]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(xs, xs.sum(-1)), batch_size=None)


def prepared(make, **settings):
    accelerator = Accelerator(cpu=True, **settings)
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    return accelerator, *accelerator.prepare(model, make(model.parameters()), batches())


def train(accelerator, model, optimizer, data):
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(((model(x).squeeze(-1) - y) ** 2).mean())
            optimizer.step()
            optimizer.zero_grad()


@EACH_OPTIMIZER
@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 3}, {"mixed_precision": "bf16"}], ids=str)
def test_each_step_is_clipped(make, settings):
    accelerator, model, optimizer, data = prepared(make, **settings)
    clipping = clip_at_step(optimizer, C)
    recorded = Recorded(optimizer.optimizer)
    train(accelerator, model, optimizer, data)
    steps = len(SCALES) // settings.get("gradient_accumulation_steps", 1)
    recorded.check(C, steps)
    assert clipping.steps == steps


@EACH_OPTIMIZER
def test_a_threshold_that_is_attached_before_prepare(make):
    """accelerate loads the optimizer's state into itself, which must not lose the history."""
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    optimizer = make(model.parameters())
    max_norm = gradclip.AdaptiveThreshold()
    clip_at_step(optimizer, max_norm)
    model.weight.grad = torch.ones(1, 3)
    optimizer.step()
    accelerator = Accelerator(cpu=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, batches())
    assert max_norm.steps == 1
    train(accelerator, model, optimizer, data)
    assert max_norm.steps == 1 + len(SCALES)


@EACH_OPTIMIZER
@pytest.mark.parametrize("attached", ["before", "after"])
def test_a_scaler(make, attached):
    """accelerate puts its own step in place of the optimizer's while a scaler steps."""
    _, model, optimizer, data = prepared(make)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    inner = optimizer.optimizer
    clipping = clip_at_step(inner, C) if attached == "before" else None
    optimizer = AcceleratedOptimizer(inner, scaler=scaler)
    clipping = clipping or clip_at_step(optimizer, C)
    recorded = Recorded(inner, scaler.get_scale)
    for x, y in data:
        scaler.scale(((model(x).squeeze(-1) - y) ** 2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    recorded.check(C, len(SCALES))
    assert clipping.steps == len(SCALES)


def test_a_saved_state_goes_on(tmp_path):
    def run(count, load=None, save=None):
        accelerator, model, optimizer, data = prepared(OPTIMIZERS["fused AdamW"])
        clipping = clip_at_step(optimizer, gradclip.AdaptiveThreshold())
        if load:
            accelerator.load_state(load)
        seen = []
        for x, y in list(data)[count]:
            accelerator.backward(((model(x).squeeze(-1) - y) ** 2).mean())
            optimizer.step()
            optimizer.zero_grad()
            seen.append((float(clipping.norm), float(clipping.threshold), model.weight.tolist()))
        if save:
            accelerator.save_state(save)
        return seen

    whole = run(slice(None))
    assert run(slice(6), save=tmp_path) + run(slice(6, None), load=tmp_path) == whole
    assert len({threshold for _, threshold, _ in whole}) > 4


@EACH_OPTIMIZER
def test_clipping_by_accelerate_is_told_of(make):
    accelerator, model, optimizer, data = prepared(make)
    clipping = clip_at_step(optimizer, C)

    def train_and_clip():
        for x, y in data:
            accelerator.backward(((model(x).squeeze(-1) - y) ** 2).mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(gradclip.ClippingWarning, match=r"gradients to 0\.5 before .*accelerator\.clip_grad_norm_"):
        train_and_clip()
    assert clipping.steps == len(SCALES)
