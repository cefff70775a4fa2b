"""The names of `torch.nn.utils` within a step of training, with and without scaled losses."""

import math

import pytest
import torch

from gradclip.integrations.torch import clip_grad_norm_, clip_grad_value_
from parity_support import assert_just_below


def linear():
    """Return y = w.x + b with w = (3, 4) and b = 0, and plain gradient descent on it."""
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0]]))
        model.bias.zero_()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def test_step_uses_the_clipped_gradients():
    model, optimizer = linear()
    model(torch.tensor([[2.0, 2.0]])).sum().backward()  # the gradients are x = (2, 2) and 1: their norm is 3
    assert clip_grad_norm_(model.parameters(), 1.5).item() == 3.0
    assert_just_below(model.weight.grad, [[1.0, 1.0]], "float32")
    optimizer.step()
    assert model.weight.tolist() == [[2.5, 3.5]]
    assert_just_below(model.bias.detach(), [-0.25], "float32")


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_scaled_losses_are_unscaled_before_they_are_clipped(scale):
    model, optimizer = linear()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(model(torch.tensor([[2.0, 2.0]])).sum()).backward()
    scaler.unscale_(optimizer)
    assert clip_grad_norm_(model.parameters(), 1.5).item() == 3.0
    scaler.step(optimizer)
    scaler.update()
    assert model.weight.tolist() == [[2.5, 3.5]]
    assert_just_below(model.bias.detach(), [-0.25], "float32")


def test_scaler_skips_a_step_whose_gradients_overflowed_though_they_were_clipped():
    model, optimizer = linear()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(torch.tensor([[3e38, 0.0]])).sum()).backward()
    scaler.unscale_(optimizer)
    assert clip_grad_norm_(model.parameters(), 1.5).item() == math.inf
    scaler.step(optimizer)
    scaler.update()
    assert model.weight.tolist() == [[3.0, 4.0]]
    assert scaler.get_scale() == 1.0


def test_embedding_with_sparse_gradients_takes_a_step():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    with torch.no_grad():
        embedding.weight.zero_()
    (embedding(torch.tensor([1, 1, 3])) * torch.tensor([[3.0, 0.0], [3.0, 0.0], [0.0, 8.0]])).sum().backward()
    assert clip_grad_norm_(embedding.parameters(), 5.0).item() == 10.0
    torch.optim.SGD(embedding.parameters(), lr=1.0).step()
    assert_just_below(-embedding.weight.detach(), [[0, 0], [3, 0], [0, 0], [0, 4]], "float32")


def test_tied_weights_are_clipped_once():
    encoder = torch.nn.Linear(2, 2, bias=False)
    decoder = torch.nn.Linear(2, 2, bias=False)
    decoder.weight = encoder.weight
    encoder.weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert clip_grad_norm_([*encoder.parameters(), *decoder.parameters()], 2.5).item() == 5.0
    assert_just_below(encoder.weight.grad, [[1.5, 0.0], [0.0, 2.0]], "float32")


def test_retained_graph_is_not_used_after_its_gradient_was_written():
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    (grad,) = torch.autograd.grad((weight**2).sum() / 2, weight, create_graph=True)
    weight.grad = grad
    product = (grad * grad).sum()
    clip_grad_norm_(weight, 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_value_clipping_takes_a_step():
    model, optimizer = linear()
    model(torch.tensor([[2.0, -0.5]])).sum().backward()
    clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    assert model.weight.tolist() == [[2.5, 4.25]]
    assert model.bias.tolist() == [-0.5]
