"""Parameters that a loss does not use: the first call warns of them."""

import pytest
import torch
from torch.func import functional_call

import gradclip
from losses import silent_linear


@pytest.mark.parametrize("method", ["materialize", "loop"])
@pytest.mark.parametrize("trainable", [True, False])
def test_a_loss_that_closes_over_the_module(method, trainable):
    model = silent_linear().requires_grad_(trainable)
    params = {name: p.detach() for name, p in model.named_parameters()}
    clipped = gradclip.clipped_grad(lambda params, x: model(x).square().sum(), 1.0, method=method)
    with pytest.warns(UserWarning, match=r"does not use argument 0\['bias'\], argument 0\['weight'\]: .* zero"):
        summed = clipped(params, torch.ones(3, 4))
    assert not any(x.any() for x in summed.values())
    assert not any(x.any() for x in clipped(params, torch.ones(3, 4)).values())  # said once


@pytest.mark.parametrize("method", ["materialize", "loop"])
def test_a_misspelt_name(method):
    model = silent_linear()
    clipped = gradclip.clipped_grad(
        lambda p, x: functional_call(model, {"weight": p["weight"], "bais": p["bias"]}, (x,)).square().sum(),
        1.0,
        method=method,
    )
    with pytest.warns(UserWarning, match=r"does not use argument 0\['bias'\]: these gradients are zero"):
        assert clipped(dict(model.named_parameters()), torch.ones(3, 4))["weight"].any()


@pytest.mark.parametrize("method", ["materialize", "loop"])
def test_gradients_that_are_zero_though_used_are_not_warned_of(method):
    params = {"a": torch.zeros(3, 2), "b": torch.ones(2)}  # as in low-rank updates, which start at zero
    clipped = gradclip.clipped_grad(lambda p, x: (x @ p["a"] @ (0 * p["b"])).sum(), 1.0, method=method)
    assert not clipped(params, torch.ones(4, 3))["a"].any()
    masked = gradclip.clipped_grad(lambda p, x: (x * p["b"]).sum(), 1.0, method=method)
    assert not masked({"b": torch.ones(2)}, torch.ones(4, 2), mask=[False] * 4)["b"].any()
