"""Gradients of PyTorch in host memory: of any layout, sparse ones, and with a graph."""

import numpy as np
import pytest
import torch

import gradclip
from frameworks import ALL, by_name

on_torch = pytest.mark.parametrize("framework", [f for f in ALL if f.name.startswith("torch")], ids=by_name)


def inplace(framework, function, parameters, *args, **kwargs):
    with framework.mode():
        return function(parameters, *args, **kwargs)


@on_torch
def test_expanded_and_non_contiguous_torch_gradients(framework):
    p, q = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2, 3))
    p.grad = torch.tensor([1.0, 2.0]).expand(2, 2)
    q.grad = torch.arange(6.0).reshape(3, 2).t()
    norm = float(inplace(framework, gradclip.clip_grad_norm_, [p, q], 1.0))
    assert norm == pytest.approx(65**0.5)
    np.testing.assert_allclose(p.grad, np.array([[1, 2], [1, 2]]) / 65**0.5, rtol=2e-7)
    np.testing.assert_allclose(q.grad, np.arange(6).reshape(3, 2).T / 65**0.5, rtol=2e-7)


@on_torch
def test_sparse_torch_gradients(framework):
    layer = torch.nn.Embedding(5, 1, sparse=True)
    for rows, expected in (([1, 1, 1, 3, 3, 3, 3], [3, 4]), ([2], [1])):
        layer.weight.grad = None
        layer(torch.tensor(rows)).sum().backward()
        norm = float(inplace(framework, gradclip.clip_grad_norm_, layer.parameters(), 0.5))
        assert norm == np.linalg.norm(expected)
        assert layer.weight.grad.is_sparse
        got = layer.weight.grad.coalesce().values().flatten()
        np.testing.assert_allclose(got, 0.5 * np.array(expected) / norm, rtol=2e-7)


def test_the_graph_of_a_gradient_is_left_alone():
    x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    (x.grad,) = torch.autograd.grad((x**2).sum() / 2, x, create_graph=True)
    assert x.grad.grad_fn is not None
    version = x.grad._version
    norm = gradclip.clip_grad_norm_(x, 1.0)
    assert norm.grad_fn is None
    assert x.grad._version > version
    assert not gradclip.grad_norm([x]).requires_grad
