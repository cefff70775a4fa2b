"""Steps that get a closure: the gradients are clipped after it, each time it is called."""

import math

import pytest
import torch

import gradclip
from gradclip import clip_at_step


def closure_of(weight, optimizer, slope):
    def closure():
        optimizer.zero_grad()
        loss = weight @ torch.tensor(slope)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("call", ["positional", "keyword"])
@pytest.mark.parametrize("fused", [False, True])
def test_clipped_after_the_closure(fused, call):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    clipping = clip_at_step(optimizer, 1.0)
    for slope in ([3.0, 4.0], [30.0, 40.0]):
        closure = closure_of(weight, optimizer, slope)
        before = weight.detach().clone()
        loss = optimizer.step(closure) if call == "positional" else optimizer.step(closure=closure)
        assert loss == before @ torch.tensor(slope)
        assert clipping.norm == math.hypot(*slope)
        torch.testing.assert_close(weight.detach() - before, torch.tensor([-0.6, -0.8]))


def test_other_arguments_of_a_step_arrive():
    class Counted(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})
            self.seen = []

        def step(self, closure=None, *more, **named):
            self.seen.append((closure(), more, named))

    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = Counted([weight])
    clip_at_step(optimizer, 1.0)
    optimizer.step(closure_of(weight, optimizer, [3.0, 4.0]), 7, mode="fast")
    assert optimizer.seen == [(0.0, (7,), {"mode": "fast"})]
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, 0.8]))


@pytest.mark.filterwarnings("ignore:at step . clipping multiplied the gradients by:UserWarning")
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_gets_every_gradient_clipped(search):
    """As if the closure itself clipped, which is how to clip for LBFGS by hand."""

    def trained(by_hand):
        weight = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
        optimizer = torch.optim.LBFGS([weight], lr=0.5, max_iter=5, line_search_fn=search)
        norms, monitor = [], gradclip.Monitor()
        clipping = None if by_hand else clip_at_step(optimizer, 1.0, monitor=monitor)

        def closure():
            optimizer.zero_grad()
            loss = (weight**4).sum() + (weight[0] * weight[1]) ** 2
            loss.backward()
            norms.append(float(gradclip.clip_grad_norm_([weight], 1.0)) if by_hand else None)
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return weight.detach(), norms if by_hand else [step.norm for step in monitor.records], clipping

    theirs, norms, _ = trained(by_hand=True)
    ours, seen, clipping = trained(by_hand=False)
    assert torch.equal(ours, theirs)
    assert seen == norms
    assert clipping.steps == len(norms) > 6


@pytest.mark.after_error
@pytest.mark.parametrize("fused", [False, True])
def test_an_error_of_the_closure_passes(fused):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    clip_at_step(optimizer, 1.0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert weight.tolist() == [0.0, 0.0]
    optimizer.step(closure_of(weight, optimizer, [3.0, 4.0]))
    assert weight.tolist() == pytest.approx([-0.6, -0.8])
