"""Steps of other optimizers with the parameters of one that is clipped or guarded, which itself does not step."""

import gc
import warnings

import pytest
import torch

import gradclip
from gradclip import clip_at_step
from gradclip._src.step import others

ATTACH = {"clip_at_step": lambda optimizer: clip_at_step(optimizer, 1.0), "guard": gradclip.guard}


def made(count=2):
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.tensor([3.0, 4.0])
    return weights


def sgd(weights):
    return torch.optim.SGD(weights, lr=1.0)


def steps(optimizer, count):
    """Step without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(count):
            optimizer.step()


@pytest.mark.parametrize("name", ATTACH)
def test_an_optimizer_made_anew_is_told_of_once(name):
    weights = made()
    handle = ATTACH[name](sgd(weights))
    anew = torch.optim.AdamW([*weights, *made()], lr=1.0)
    steps(anew, 99)
    said = rf"{name} was called for one SGD, which has not stepped, while one AdamW has stepped 100 times"
    with pytest.warns(gradclip.ClippingWarning, match=said) as told:
        anew.step()
    assert told[0].filename == __file__
    steps(anew, 101)
    handle.remove()


CASES = {
    "it steps": lambda optimizer, handle: optimizer.step(),
    "removed": lambda optimizer, handle: handle.remove(),
}


@pytest.mark.parametrize("name", ATTACH)
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_said_of_one_that_steps_or_was_removed(name, case):
    weights = made()
    optimizer, other = sgd(weights), sgd(weights)
    handle = ATTACH[name](optimizer)
    steps(other, 99)
    CASES[case](optimizer, handle)
    steps(other, 101)
    assert id(handle._elsewhere) not in others._waiting
    handle.remove()


@pytest.mark.parametrize("name", ATTACH)
def test_nothing_is_said_of_others(name):
    """They have other parameters, or only some of them, as before layers are unfrozen, or are watched themselves."""
    weights = made()
    handle, other = ATTACH[name](sgd(weights)), sgd(weights)
    steps(sgd(made()), 101)
    steps(sgd(weights[:1]), 101)
    beside = ATTACH[name](other)
    steps(other, 101)
    beside.remove()
    handle.remove()


def test_what_waits_keeps_nothing_and_the_hooks_stay():
    gc.collect()
    before = set(others._waiting)
    handle = clip_at_step(sgd(made()), 1.0)
    assert set(others._waiting) - before == {id(handle._elsewhere)}
    del handle
    gc.collect()
    assert not set(others._waiting) - before
    assert len(others._registered) == 2


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
