"""Steps that are compiled clip, too."""

import pytest
import torch

from gradclip import clip_at_step


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("attached", ["before", "after"])
@pytest.mark.parametrize("call", ["the step", "a function that steps"])
def test_a_compiled_step_clips(call, attached):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    torch.compiler.reset()
    clipping = clip_at_step(optimizer, 1.0) if attached == "before" else None
    step = torch.compile(optimizer.step if call == "the step" else lambda: optimizer.step(), backend="eager")
    weight.grad = torch.zeros(2)
    step()
    clipping = clipping or clip_at_step(optimizer, 1.0)
    for scale in (1.0, 10.0, 0.1, *range(1, 12)):
        with torch.no_grad():
            weight.zero_()
        weight.grad = torch.tensor([3.0, 4.0]) * scale
        step()
        expected = min(1.0, 5.0 * scale)
        assert weight.detach().tolist() == pytest.approx([-0.6 * expected, -0.8 * expected])
        assert clipping.norm == pytest.approx(5.0 * scale)
