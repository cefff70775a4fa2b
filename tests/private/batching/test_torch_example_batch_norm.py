"""Normalising over a batch mixes its examples: an error, or a warning where each is normalised alone."""

import pytest
import torch

import gradclip
from losses import sum_of_squares


def normalising(**settings):
    return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2, **settings))


@pytest.mark.parametrize("method", ["materialize", "loop"])
def test_batch_norm(method):
    images = torch.randn(3, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    model = normalising()
    clipped, params = gradclip.clipped_grad(sum_of_squares(model), 1.0, method=method), dict(model.named_parameters())
    with pytest.raises(RuntimeError, match=r"BatchNorm2d in training mode mixes the examples.*GroupNorm.*\.eval\(\)"):
        clipped(params, images)
    assert int(model[1].num_batches_tracked) == 0
    model.eval()
    assert float(clipped(params, images)["1.weight"].abs().sum()) > 0
    model = normalising(track_running_stats=False)
    clipped = gradclip.clipped_grad(sum_of_squares(model), 1.0, method=method)
    with pytest.warns(UserWarning, match="BatchNorm2d with track_running_stats=False normalises each example alone"):
        clipped(dict(model.named_parameters()), images)


@pytest.mark.parametrize("method", ["materialize", "loop"])
def test_batch_norm_over_a_group_that_is_clipped_as_one(method):
    model = normalising(track_running_stats=False)
    clipped = gradclip.clipped_grad(sum_of_squares(model), 1.0, method=method, keep_batch_dim=False, unit="group")
    assert clipped(dict(model.named_parameters()), torch.randn(3, 4, 1, 5, 5))["1.weight"].shape == (2,)
    assert not torch.nn.modules.module._global_forward_pre_hooks
