"""Under GradScaler, the gradients that are clipped are unscaled ones."""

import math

import pytest
import torch

import gradclip
from gradclip import clip_at_step
from scaled import stepped

OPTIMIZERS = {
    "plain": lambda p: torch.optim.SGD(p, lr=1.0),
    "fused": lambda p: torch.optim.SGD(p, lr=1.0, fused=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=1.0, foreach=True),
}


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("scale", [1.0, 65536.0, 1000.0])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_clipped_unscaled(make, scale, unscale):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = make([weight])
    clipping = clip_at_step(optimizer, 1.0, monitor=(monitor := gradclip.Monitor()))
    stepped(torch.amp.GradScaler("cpu", init_scale=scale), weight, optimizer, unscale=unscale)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))
    assert clipping.norm.item() == pytest.approx(5.0, rel=1e-6)
    assert monitor.last.norm == pytest.approx(5.0, rel=1e-6)


@pytest.mark.parametrize("nonfinite", ["propagate", "raise", "skip"])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_scale_that_was_too_large(make, nonfinite, unscale):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = make([weight])
    clip_at_step(optimizer, 1.0, nonfinite=nonfinite, monitor=(monitor := gradclip.Monitor()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    stepped(scaler, weight, optimizer, (3.0, math.inf), unscale=unscale)
    assert weight.tolist() == [0.0, 0.0]
    assert scaler.get_scale() == 512.0
    stepped(scaler, weight, optimizer, unscale=unscale)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))
    assert monitor.num_nonfinite == monitor.num_skipped <= 1


@pytest.mark.after_error
@pytest.mark.parametrize("settings", [{"nonfinite": "zero"}, {"max_norm": 2.0**-60}], ids=str)
def test_a_fused_optimizer_that_cannot_fold_says_to_unscale(settings):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = OPTIMIZERS["fused"]([weight])
    clip_at_step(optimizer, **{"max_norm": 1.0, **settings})
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with pytest.raises(ValueError, match=r"Call scaler\.unscale_\(optimizer\) before scaler\.step"):
        stepped(scaler, weight, optimizer)
    assert weight.tolist() == [0.0, 0.0]
    scaler.update()
    stepped(scaler, weight, optimizer, unscale=True)
    expected = 1.0 if "nonfinite" in settings else 2.0**-60
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]) * expected)


@pytest.mark.after_error
def test_an_optimizer_that_asks_the_scaler_itself_is_refused():
    class Asks(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, grad_scaler=None):
            raise AssertionError("its gradients are still scaled")

    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = Asks([weight], lr=1.0)
    clip_at_step(optimizer, 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="leaves the gradients scaled for this Asks"):
        stepped(scaler, weight, optimizer)
    torch.testing.assert_close(weight.grad, torch.tensor([3.0, 4.0]) * 64.0)


def test_what_the_scaler_found_is_no_error_where_gradients_are_clipped_in_place():
    """A fused optimizer whose threshold cannot fold, and a policy that raises."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = OPTIMIZERS["fused"]([weight])
    clip_at_step(optimizer, 2.0**-60, nonfinite="raise")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    stepped(scaler, weight, optimizer, (math.inf, 1.0), unscale=True)
    assert weight.tolist() == [0.0, 0.0]
    assert scaler.get_scale() == 32.0
