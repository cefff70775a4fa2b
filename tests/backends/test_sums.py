"""Sums by halves, beside the sums of the framework."""

import math

import pytest
import torch
from array_api_compat import torch as namespace

from gradclip._src.backends.sums import halving_sum


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        *[((1,), (0,)), ((2,), (0,)), ((5,), (0,)), ((4, 7), (1,)), ((4, 7), (0, 1)), ((3, 5, 2), (1, 2))],
        *[((4, 0), (1,)), ((0, 3), (1,)), ((0,), (0,)), ((), ())],
    ],
)
def test_halving_sum(shape, axes):
    terms = torch.arange(float(math.prod(shape))).reshape(shape)
    assert halving_sum(namespace, terms, axes).tolist() == terms.sum(axes).tolist()
