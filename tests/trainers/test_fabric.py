"""An optimizer that Fabric wraps clips at its step, and so does one of the two of a GAN, whose other is measured."""

import lightning
import pytest
import torch

import gradclip
from recorded import norm_of

C = 0.5


def test_fabric_clips_at_the_step_of_a_wrapped_optimizer():
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(0)
    plain = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    model, wrapped = fabric.setup(plain, optimizer)
    handle = gradclip.clip_at_step(wrapped, C)
    before = [p.detach().clone() for p in plain.parameters()]
    fabric.backward(((model(torch.arange(12.0).reshape(4, 3)) - 1) ** 2).mean())
    norm = norm_of([p.grad for p in plain.parameters()])
    wrapped.step()
    assert float(handle.norm) == pytest.approx(norm, rel=1e-4)
    change = norm_of([a - b.detach() for a, b in zip(before, plain.parameters(), strict=True)])
    assert change == pytest.approx(min(norm, C), rel=1e-4)


def test_a_critic_is_clipped_and_its_generator_only_measured():
    torch.manual_seed(0)
    generator, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    steps = [torch.optim.SGD(one.parameters(), lr=1.0) for one in (generator, critic)]
    measured, clipped = gradclip.clip_at_step(steps[0], float("inf")), gradclip.clip_at_step(steps[1], 0.1)
    for _ in range(3):
        noise = torch.randn(16, 2)
        steps[1].zero_grad()
        (critic(generator(noise).detach()) - critic(torch.randn(16, 2) + 3)).mean().backward()
        steps[1].step()
        assert norm_of([p.grad for p in critic.parameters()]) <= 0.1 < float(clipped.norm)
        steps[0].zero_grad()
        (-critic(generator(noise))).mean().backward()
        norm = norm_of([p.grad for p in generator.parameters()])
        steps[0].step()
        assert norm_of([p.grad for p in generator.parameters()]) == norm
        assert float(measured.norm) == pytest.approx(norm, rel=1e-4)
