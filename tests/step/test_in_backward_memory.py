"""Clipping a gradient in the backward pass writes no memory that others read."""

import math

import pytest
import torch

from gradclip.integrations.torch import clip_in_backward


def test_other_gradients_are_not_written():
    """PyTorch keeps a view of what it hands to other parameters as a gradient."""
    a, b, x = torch.nn.Parameter(torch.zeros(2, 1)), torch.nn.Parameter(torch.ones(2)), torch.tensor([3.0, 4.0])
    clipping = clip_in_backward([("a", a), ("b", b)], {"a": 1.0, "b": math.inf})
    ((b * torch.tensor([1.0, 2.0]) + a.view(2)) @ x).backward()
    assert b.grad.tolist() == [3.0, 8.0]
    assert a.grad.flatten().tolist() == pytest.approx([0.6, 0.8])
    assert float(clipping.norms["b"]) == pytest.approx(math.sqrt(73))
    given = torch.tensor([3.0, 4.0])
    a.grad = None
    torch.autograd.backward([a.view(2)], [given])
    assert given.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("rows", [[2], [3, 0], [1, 1, 2, 1]], ids=str)
def test_values_of_a_sparse_gradient_belong_to_others_too(rows):
    """Autograd hands the values of a sparse gradient to `beside` as well, in one memory."""
    table, beside = torch.nn.Parameter(torch.zeros(4, 3)), torch.nn.Parameter(torch.zeros(len(rows), 3))
    clipping = clip_in_backward({"table": table, "beside": beside}, {"table": 2.0, "beside": math.inf})
    last = beside * 2.0  # what is computed first has its gradient last
    found = torch.nn.functional.embedding(torch.tensor(rows), table, sparse=True)
    ((found + last) * 7.0).sum().backward()
    assert (beside.grad == 14.0).all()
    assert float(table.grad.to_dense().norm()) == pytest.approx(2.0)
    wanted = torch.zeros(4, 3).index_add_(0, torch.tensor(rows), torch.full((len(rows), 3), 7.0))
    assert float(clipping.norms["table"]) == pytest.approx(float(wanted.norm()))


class Handed(torch.autograd.Function):
    """Hands the gradient `given` to its argument."""

    @staticmethod
    def forward(ctx, weight, given):
        ctx.given = given
        return weight.sum()

    @staticmethod
    def backward(ctx, *_):
        return ctx.given, None


def test_a_sparse_gradient_that_the_caller_holds():
    given = torch.tensor([[0.0, 3.0], [4.0, 0.0]]).to_sparse()
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    clip_in_backward([weight], 1.0)
    Handed.apply(weight, given).backward()
    assert given.values().tolist() == [3.0, 4.0]
    assert float(weight.grad.to_dense().norm()) == pytest.approx(1.0)


class Named(torch.Tensor):
    """A tensor of another class."""


def test_a_gradient_of_another_class():
    given = torch.tensor([3.0, 4.0]).as_subclass(Named)
    weight = torch.nn.Parameter(torch.zeros(2))
    clip_in_backward([weight], 1.0)
    torch.autograd.backward([weight.view(2)], [given])
    assert given.tolist() == [3.0, 4.0]
    assert weight.grad.tolist() == pytest.approx([0.6, 0.8])
