"""`torch.compile` with inductor: calls in one graph, whose kernels keep the bound."""

import math

import numpy as np
import pytest
import torch

import gradclip
from on_gpu import DEVICE, drawn, moved, on_host, same_bits
from rational import at_most, power_of_norm

pytestmark = pytest.mark.gpu
SHAPES = [(70, 40), (1001,), ()]
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def norm_of(leaves):
    return float(gradclip.global_norm([x.double() for x in leaves]))


def test_in_place():
    leaves, there = drawn(90, DTYPES, SHAPES)
    parameters = [torch.nn.Parameter(torch.zeros_like(x)) for x in there]
    wanted = norm_of(leaves)

    @torch.compile(fullgraph=True)
    def clip(parameters):
        return gradclip.clip_grad_norm_(parameters, 0.5)

    for scale in (1.0, 4.0, 2.0**-9):
        for parameter, x in zip(parameters, there, strict=True):
            parameter.grad = x * scale
        norm = clip(parameters)
        results = [p.grad for p in parameters]
        assert float(norm) == pytest.approx(wanted * scale, rel=1e-6)
        assert at_most(on_host(results), 2, 0.5)
        if scale < 1:
            assert same_bits(results, [x * scale for x in leaves])
        else:
            assert power_of_norm(on_host(results), 2) >= 0.495**2


def test_functional():
    leaves, there = drawn(91, DTYPES, SHAPES)
    wanted = norm_of(leaves)

    @torch.compile(fullgraph=True)
    def clip(tree, max_norm):
        return gradclip.clip_by_global_norm(tree, max_norm)

    for share in (0.3, 0.7, 2.0):
        max_norm = torch.tensor(wanted * share, device=DEVICE, dtype=torch.float64)
        clipped, norm = clip(dict(zip("abc", there, strict=True)), max_norm)
        assert float(norm) == pytest.approx(wanted, rel=1e-6)
        assert at_most(on_host(clipped.values()), 2, float(max_norm))
        if share > 1:
            assert same_bits(clipped.values(), leaves)
        else:
            assert power_of_norm(on_host(clipped.values()), 2) >= (0.99 * float(max_norm)) ** 2


@pytest.mark.parametrize("policy", ["drop", "zero"])
def test_policies(policy):
    """Small, so that its kernels are few."""

    @torch.compile(fullgraph=True)
    def clip(tree):
        return gradclip.clip_by_global_norm(tree, 1.0, nonfinite=policy)

    (bad,) = moved([torch.tensor([3.0, math.nan, 4.0, 12.0])])
    clipped, _ = clip([bad])
    wanted = {"drop": [0.0] * 4, "zero": np.array([3, 0, 4, 12]) / 13}[policy]
    np.testing.assert_allclose(on_host(clipped)[0], wanted, rtol=1e-5)
