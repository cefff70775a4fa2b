"""Scales and biases of normalizations are made from the cotangents, without a copy for each example."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradclip._src.private.ghost.records import Made
from gradclip._src.private.ghost.torch.taps import TorchTaps
from tapped_torch import distance, gradients_by_loop, tapped_gradients, with_aux

DTYPE = torch.float64


def last(y):
    """A loss of any result in which each element counts differently."""
    weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).reshape(y.shape)
    return (torch.sin(y) * weights).sum()


def checked(module, shape):
    """Return the reasons of a module's parameters, after a look at the gradients."""
    torch.manual_seed(0)
    module.to(DTYPE)
    params = {name: torch.randn_like(x) for name, x in module.named_parameters()}
    loss = lambda p, x: last(torch.func.functional_call(module, p, (x,)))
    x = torch.randn(3, *shape, dtype=DTYPE)
    for only in (None, []):
        uses, result, found = tapped_gradients(loss, params, x, only=only)
        assert distance(found, gradients_by_loop(loss, params, x)) < 1e-10
        assert all(isinstance(gradient, Made) for gradient in result.gradients)
    return {name: use.reason for name, use in uses.items()}


NORMS = [
    (nn.LayerNorm(4), (5, 4), ["bias of layer_norm", "scale of layer_norm"]),
    (nn.LayerNorm(4), (4,), ["bias of layer_norm", "scale of layer_norm"]),
    (nn.LayerNorm(4, bias=False, eps=0.1), (2, 5, 4), ["scale of layer_norm"]),
    (nn.RMSNorm(4), (5, 4), ["scale of rms_norm"]),
    (nn.GroupNorm(2, 4), (2, 4, 3, 5), ["bias of group_norm", "scale of group_norm"]),
    (nn.GroupNorm(2, 4), (1, 4), ["bias of group_norm", "scale of group_norm"]),
    (nn.InstanceNorm1d(4, affine=True), (1, 4, 5), ["torch.nn.functional.instance_norm"] * 2),
    (nn.LayerNorm((5, 4)), (5, 4), ["torch.nn.functional.layer_norm"] * 2),
]


@pytest.mark.parametrize(("module", "shape", "reasons"), NORMS, ids=lambda x: f"{x}")
def test_scales_and_biases(module, shape, reasons):
    assert sorted(checked(module, shape).values()) == reasons


def test_the_same_scale_is_used_again():
    torch.manual_seed(0)
    params = {name: torch.randn(4, dtype=DTYPE) for name in "gb"}
    x = torch.randn(3, 5, 4, dtype=DTYPE)

    def loss(p, x):
        y = F.layer_norm(x, (4,), p["g"], p["b"])
        return last(
            F.layer_norm(y, (4,), p["g"], p["b"]) * p["g"] + F.linear(x, x, p["b"].sum()[None].expand(5))[:, :1]
        )

    uses, _, found = tapped_gradients(loss, params, x)
    # A bias is only added, which `ghost` would accept: the reason names what it would not.
    assert [use.reason for use in uses.values()] == ["torch.Tensor.sum", "scale of layer_norm"]
    assert distance(found, gradients_by_loop(loss, params, x)) < 1e-10


def test_an_input_that_is_overwritten_is_an_error():
    def loss(p, x):
        h = torch.tanh(x)
        y = F.layer_norm(h, (4,), p["g"])
        h.mul_(2)
        return last(y)

    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        TorchTaps().run(with_aux(loss), 0, ({"g": torch.ones(4)}, torch.ones(3, 5, 4)), (None, 0), [False])
