"""Steps that are compiled clip, too."""

import pytest
import torch

from gradclip.integrations.torch import fold_into


@pytest.mark.parametrize("call", ["the step", "a function that steps"])
def test_a_compiled_step_clips_too(call):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    fold_into(optimizer, 1.0)
    torch.compiler.reset()
    step = torch.compile(optimizer.step if call == "the step" else lambda: optimizer.step(), backend="eager")
    for scale in (1.0, 10.0):
        with torch.no_grad():
            weight.zero_()
        weight.grad = torch.tensor([3.0, 4.0]) * scale
        step()
        assert weight.detach().tolist() == pytest.approx([-0.6, -0.8])
