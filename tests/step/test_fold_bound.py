"""What a folded step uses has a norm of at most the threshold, in exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from gradclip import clip_at_step
from rational import at_most, power_of_norm

WIDE = (torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)
TIGHT = 1 - 2e-6


def used(grads, max_norm, ord=2, scale=None, make=lambda p: torch.optim.SGD(p, lr=1.0, fused=True)):
    """Return what a step subtracts from parameters of zeros, and the gradients that it leaves."""
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    optimizer = make(params)
    clip_at_step(optimizer, max_norm, ord=ord, fused=True)
    if scale is not None:
        optimizer.grad_scale = torch.tensor(scale)
    for parameter, grad in zip(params, grads, strict=True):
        parameter.grad = grad.clone()
    optimizer.step()
    return [parameter.detach() for parameter in params], [parameter.grad for parameter in params]


def arrays(tensors):
    return [tensor.double().numpy() for tensor in tensors]


def random_grads(rng, dtypes, exponents):
    sizes = rng.choice([1, 2, 15, 16, 17], size=3)
    return [
        torch.from_numpy(rng.standard_normal(size) * 10.0 ** rng.uniform(*exponents, size)).to(dtype)
        for size, dtype in zip(sizes, rng.permutation(np.array(dtypes, dtype=object).repeat(3))[:3], strict=True)
    ]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
@pytest.mark.parametrize("dtypes", [WIDE[:1], WIDE[1:], WIDE], ids=str)
def test_float32_and_float64(dtypes, ord, scaled):
    rng = np.random.default_rng(0)
    clipped = 0
    for _ in range(40):
        low = rng.uniform(-30, 25)
        grads = random_grads(rng, dtypes, (low, low + rng.uniform(0, 8)))
        norm = float(power_of_norm(arrays(grads), ord)) ** (1 / (1 if math.isinf(ord) else ord))
        threshold = norm * rng.choice([1.0, 1 - 1e-9, 0.5, 10.0 ** rng.uniform(-8, 1)])
        scale = float(np.float32(2.0 ** rng.integers(-10, 17) * rng.choice([1.0, 1.3]))) if scaled else 1.0
        threshold = min(max(threshold / scale, 2.0**-50), 2.0**100)
        subtracted, left = used(grads, threshold, ord, scale if scaled else None)
        assert all(map(torch.equal, left, [-parameter for parameter in subtracted]))
        assert at_most(arrays(left), ord, threshold)
        if threshold * scale < norm < threshold * 2.0**120:
            clipped += 1
            assert not at_most(arrays(left), ord, threshold * TIGHT)
    assert clipped > 10


@pytest.mark.parametrize("size", [1, 1000, 65537])
def test_quotients_that_all_round_up(size):
    """Elements of one size have quotients that round alike, so that nothing averages out."""
    for value in np.random.default_rng(size).uniform(1.0, 2.0, 40 if size < 10_000 else 4):
        found, _ = used([torch.full((size,), value, dtype=torch.float32)], 1.0)
        element = Fraction(found[0][0].item())
        assert torch.equal(found[0], found[0][:1].expand(size))
        assert size * element**2 <= 1
        assert size * element**2 >= Fraction(TIGHT) ** 2


def test_float32_above_its_range():
    found, _ = used([torch.full((9,), 3e38)], 1.0)
    assert at_most(arrays(found), 2, 1.0)
    found, _ = used([torch.full((9,), 3e38)], 2.0**-50)
    assert at_most(arrays(found), 2, 2.0**-50)
    found, _ = used([torch.full((9,), 1e300, dtype=torch.float64)], 1.0)
    assert found[0].tolist() == [0.0] * 9


@pytest.mark.parametrize("ord", [1, 2, math.inf])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_types_but_for_what_is_left_in_grad(dtype, ord):
    """The divisor is the one of the bound; what stands in `.grad` is rounded to nearest once more.

    Parameters of half types show no more of what a step uses, and the CPU's fused SGD of PyTorch 2.13 leaves them as
    they are where vectors of its are full.
    """
    rng = np.random.default_rng(1)
    rounded = Fraction(1) + Fraction(torch.finfo(dtype).eps) / 2
    for _ in range(20):
        grads = random_grads(rng, [dtype], (-2, 3))
        found = used(grads, 1.0, ord, make=lambda p: torch.optim.Adam(p, fused=True))[1]
        limit = rounded ** (1 if math.isinf(ord) else ord)
        # The smallest step of float16 counts beside the relative error.
        assert power_of_norm(arrays(found), ord) <= limit * (1 + Fraction(200, 2**14))
