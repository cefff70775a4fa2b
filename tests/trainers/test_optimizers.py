"""SOAP, Shampoo, AdamW, SAM of pytorch_optimizer and 8-bit Adam of bitsandbytes get what `clip_at_step` has clipped."""

import pytest
import pytorch_optimizer
import torch
from bitsandbytes.optim import Adam8bit

import gradclip
from recorded import norm_of

C = 0.5


def loss_of(net):
    return ((net(torch.arange(12.0).reshape(4, 3) / 4) - 1) ** 2).mean()


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def moved(net, optimizer, steps, *, by_hand):
    """Return parameters after some steps, clipped by gradclip at the step, or before it by a plain formula."""
    handle = None if by_hand else gradclip.clip_at_step(optimizer, C)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(net).backward()
        norms.append(norm_of([p.grad for p in net.parameters()]))
        if by_hand:
            gradclip.clip_grad_norm_(net.parameters(), C)
        optimizer.step()
        if handle is not None:
            assert float(handle.norm) == pytest.approx(norms[-1], rel=1e-4)
    assert max(norms) > C
    return [p.detach().clone() for p in net.parameters()]


OPTIMIZERS = {
    "SOAP": lambda p: pytorch_optimizer.SOAP(p, lr=1e-2),
    "Shampoo": lambda p: pytorch_optimizer.Shampoo(p, lr=1e-2),
    "ScheduleFreeAdamW": lambda p: pytorch_optimizer.ScheduleFreeAdamW(p, lr=1e-2),
    "StableAdamW": lambda p: pytorch_optimizer.StableAdamW(p, lr=1e-2),
    "Adam8bit": lambda p: Adam8bit(p, lr=1e-2, min_8bit_size=64),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_optimizer_gets_what_it_gets_when_gradients_are_clipped_before(make):
    ours, plain = net(), net()
    mine = moved(ours, make(ours.parameters()), 6, by_hand=False)
    theirs = moved(plain, make(plain.parameters()), 6, by_hand=True)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_sam_clips_the_step_and_not_its_ascent():
    model = net()
    sam = pytorch_optimizer.SAM(model.parameters(), base_optimizer=torch.optim.SGD, rho=0.05, lr=0.1)
    handle = gradclip.clip_at_step(sam.base_optimizer, C)
    loss_of(model).backward()
    sam.first_step(zero_grad=True)
    loss_of(model).backward()
    norm = norm_of([p.grad for p in model.parameters()])
    kept = [sam.state[p]["old_p"].clone() for p in model.parameters()]
    sam.second_step(zero_grad=True)
    assert float(handle.norm) == pytest.approx(norm, rel=1e-4)
    assert norm > C
    change = norm_of([a - b for a, b in zip((p.detach() for p in model.parameters()), kept, strict=True)])
    assert change == pytest.approx(0.1 * C, rel=1e-4)
