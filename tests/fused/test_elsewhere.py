"""Steps of other optimizers with the parameters of one that is clipped or guarded, which itself does not step."""

import gc
import warnings

import pytest
import torch
from torch.optim import optimizer as of_torch

import gradclip
from gradclip.fused import elsewhere
from gradclip.integrations.torch import clip_at_step

ATTACH = {"clip_at_step": lambda optimizer: clip_at_step(optimizer, 1.0), "guard": gradclip.guard}


@pytest.fixture(autouse=True)
def alone():
    gc.collect()  # optimizers that other tests have left
    for one in tuple(elsewhere._waiting):
        one.stop()
    yield
    for one in tuple(elsewhere._waiting):
        one.stop()
    assert not of_torch._global_optimizer_pre_hooks


def made(count=2):
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.tensor([3.0, 4.0])
    return weights


def sgd(weights):
    return torch.optim.SGD(weights, lr=1.0)


@pytest.mark.parametrize("name", ATTACH)
def test_an_optimizer_made_anew_is_told_of_once(name):
    weights = made()
    handle = ATTACH[name](sgd(weights))
    anew = torch.optim.AdamW(weights[:1], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        anew.step()
    said = rf"{name} was called for one SGD, which has not stepped, while one AdamW has stepped 2 times"
    with pytest.warns(gradclip.ClippingWarning, match=said) as told:
        anew.step()
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        anew.step()
    handle.remove()


@pytest.mark.parametrize("name", ATTACH)
@pytest.mark.parametrize("removed", [False, True])
def test_nothing_is_said_of_one_that_steps_or_was_removed(name, removed):
    weights = made()
    optimizer, other, apart = sgd(weights), sgd(weights), sgd(made())
    handle = ATTACH[name](optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            apart.step()
        other.step()
        if removed:
            handle.remove()
        else:
            optimizer.step()
        for _ in range(3):
            other.step()
    assert not of_torch._global_optimizer_pre_hooks
    handle.remove()


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """As PyTorch's, of one process's view."""

    def __init__(self, weights, mine):
        super().__init__(weights, {})
        self.optim = sgd(mine)

    def step(self):
        self.optim.step()


@pytest.mark.parametrize("name", ATTACH)
def test_the_share_of_one_process_is_refused_at_its_step(name):
    weights = made()
    whole = ZeroRedundancyOptimizer(weights, weights[:1])
    handle = ATTACH[name](whole.optim)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"part of a ZeroRedundancyOptimizer.*Call {name} for the"):
            whole.step()
    assert not weights[0].any()
    handle.remove()
    handle = ATTACH[name](whole)
    whole.step()
    torch.testing.assert_close(
        weights[0].detach(), -torch.tensor([3.0, 4.0]) / (50.0**0.5 if name == "clip_at_step" else 1.0)
    )
    handle.remove()
