"""Settings that no optimizer can follow are refused before anything is attached."""

import pytest
import torch

import gradclip


@pytest.mark.parametrize("fused", [None, 1, 0, "yes", "Auto"])
def test_fused_has_three_values(fused):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    with pytest.raises(ValueError, match=r"fused must be 'auto', True or False, got .* True demands it"):
        gradclip.clip_at_step(optimizer, 1.0, fused=fused)
    assert not optimizer._optimizer_step_pre_hooks


def test_a_clamp_has_no_order():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    with pytest.raises(ValueError, match=r"scope='value' measures no norm, so ord=1 has no effect\. Leave ord out"):
        gradclip.clip_at_step(optimizer, 1.0, scope="value", ord=1)
    gradclip.clip_at_step(optimizer, 1.0, scope="value", ord=2.0)
