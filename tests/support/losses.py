"""A loss of a batch with the framework's own arrays, and models, for the tests of clipped functions."""

import jax
import numpy as np
import torch
from torch.func import functional_call

BATCH = 7


def loss(params, x, y):
    out = x @ params["w"] + params["b"]
    return ((out - y) ** 2).mean(), {"out": out, "total": out.sum()}


def problem(make):
    rng = np.random.default_rng(0)
    params = {"w": make(np.float32(rng.normal(size=(3, 2)))), "b": make(np.float32([0.5, -1.0]))}
    return params, make(np.float32(rng.normal(size=(BATCH, 3)))), make(np.float32(rng.normal(size=(BATCH, 2))))


def same(found, expected):
    """Compare trees to a few units in the last place of 1."""
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-6, atol=2e-6)


def silent_linear():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)


def sum_of_squares(model):
    return lambda params, x: functional_call(model, params, (x,)).square().sum()
