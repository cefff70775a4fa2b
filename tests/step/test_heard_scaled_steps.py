"""What is heard of the steps that a GradScaler makes. `tests/distributed/at_step.py` has several processes."""

import math

import pytest
import torch

from gradclip._src.step.heard import ScaledSteps


@pytest.fixture
def heard():
    """Yield a function that steps one optimizer with a GradScaler, and returns what was heard and the scale."""
    made = []

    def step(values, *, fused=False, unscale=False, mark=False):
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
        told = []

        def unscaling(unscale):
            unscale()
            told.append(weight.grad.tolist())

        steps = ScaledSteps(optimizer, unscaling, lambda: told.append("skip"))
        made.append(steps)
        optimizer.register_step_pre_hook(lambda *_: steps.overflowed(torch.ones(())) if mark else None)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(weight @ torch.tensor(values)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert steps.scaler is None
        scaler.update()
        return told, scaler.get_scale()

    yield step
    for one in made:
        one.stop()


@pytest.mark.parametrize("unscale", [False, True])
def test_gradients_are_unscaled_once_and_a_skip_is_told(heard, unscale):
    assert heard([3.0, 4.0], unscale=unscale) == ([[3.0, 4.0]], 64.0)
    assert heard([3.0, math.inf], unscale=unscale) == ([[3.0, math.inf], "skip"], 32.0)


def test_the_scale_follows_an_overflow_elsewhere(heard):
    assert heard([3.0, 4.0], mark=True) == ([[3.0, 4.0]], 32.0)


def test_an_optimizer_that_makes_all_steps_is_left_to_itself(heard):
    assert heard([3.0, math.inf], fused=True) == ([], 32.0)


def test_a_scaler_without_gradients_raises_as_its_step_does():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    steps = ScaledSteps(optimizer, lambda unscale: unscale(), None)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)
    assert steps.scaler is None  # a step without a scaler may follow
    steps.stop()
