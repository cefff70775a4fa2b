"""Steps that are compiled clip, too."""

import pytest
import torch

from gradclip import clip_at_step


@pytest.mark.parametrize("call", ["the step", "a function that steps"])
def test_a_compiled_step_clips_too(call):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    clip_at_step(optimizer, 1.0, fused=True)
    torch.compiler.reset()
    step = torch.compile(optimizer.step if call == "the step" else lambda: optimizer.step(), backend="eager")
    for scale in (1.0, 10.0):
        with torch.no_grad():
            weight.zero_()
        weight.grad = torch.tensor([3.0, 4.0]) * scale
        step()
        assert weight.detach().tolist() == pytest.approx([-0.6, -0.8])


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("call", ["the step", "a function that steps"])
def test_a_step_compiled_before_clips_too(call, called_before):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    torch.compiler.reset()
    step = torch.compile(optimizer.step if call == "the step" else lambda: optimizer.step(), backend="eager")
    weight.grad = torch.zeros(2)
    if called_before:
        step()
    clipping = clip_at_step(optimizer, 1.0, nonfinite="skip", fused=True)
    for scale in (1.0, 0.01, 10.0, 0.1, torch.nan, *range(1, 12)):
        with torch.no_grad():
            weight.zero_()
        weight.grad = torch.tensor([3.0, 4.0]) * scale
        step()
        expected = 0.0 if scale != scale else min(1.0, 5.0 * scale)
        assert weight.detach().tolist() == pytest.approx([-0.6 * expected, -0.8 * expected])
    clipping.remove()
    weight.grad = torch.tensor([30.0, 40.0])
    step()
    assert torch.linalg.vector_norm(weight) > 10
