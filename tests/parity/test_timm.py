"""Side by side with `timm.utils.adaptive_clip_grad`, written again here from timm 1.0's `timm/utils/agc.py`.

timm is not needed to run this.
"""

import numpy as np
import pytest
import torch

import gradclip
from parity_support import ulps_apart

SHAPES = ((), (7,), (5, 9), (1, 6), (4, 3, 5), (6, 4, 3, 3), (3, 2, 3, 3, 2))


def unitwise_norm(x):
    return x.norm(2.0) if x.ndim <= 1 else x.norm(2.0, dim=tuple(range(1, x.ndim)), keepdim=True)


def adaptive_clip_grad(parameters, clip_factor=0.01, eps=1e-3):
    for p in parameters:
        max_norm = unitwise_norm(p.detach()).clamp_(min=eps).mul_(clip_factor)
        grad_norm = unitwise_norm(p.grad)
        clipped_grad = p.grad * (max_norm / grad_norm.clamp(min=1e-6))
        p.grad.copy_(torch.where(grad_norm < max_norm, p.grad, clipped_grad))


def parameters(dtype, seed):
    rng = np.random.default_rng(seed)
    made = []
    for shape in SHAPES:
        sizes = 10.0 ** rng.integers(-3, 2, size=(*shape[:1], *[1] * (len(shape) - 1)))
        made.append(torch.nn.Parameter(torch.from_numpy(np.asarray(rng.normal(size=shape) * sizes)).to(dtype)))
        made[-1].grad = torch.from_numpy(np.asarray(rng.normal(size=shape) * 0.05)).to(dtype)
    return made


def as_timm_does(made, dtype):
    """Return the gradients that timm leaves, computed in a dtype."""
    theirs = [torch.nn.Parameter(p.detach().to(dtype)) for p in made]
    for p, other in zip(made, theirs, strict=True):
        other.grad = p.grad.to(dtype, copy=True)
    adaptive_clip_grad(theirs, 0.1)
    return [p.grad for p in theirs]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("seed", range(3))
def test_within_four_units_in_the_last_place(dtype, seed):
    made = parameters(getattr(torch, dtype), seed)
    wider, own = as_timm_does(made, torch.float64), as_timm_does(made, torch.float32)
    before = [p.grad.clone() for p in made]
    functional, _ = gradclip.adaptive_grad_clip(before, [p.detach() for p in made], clipping=0.1)
    gradclip.adaptive_grad_clip_(made, 0.1)
    for p, new, exact, peer in zip(made, functional, wider, own, strict=True):
        assert torch.equal(p.grad, new)
        # In float64 a norm and a threshold are lowered by more than a unit, so that the bound holds.
        assert ulps_apart(p.grad.double(), exact, dtype) <= (2 * p.numel() + 64 if dtype == "float64" else 4)
        if dtype != "float64":  # timm rounds three times itself; of float64 its float32 tells nothing
            assert ulps_apart(p.grad.double(), peer, dtype) <= 6
    assert sum(not torch.equal(p.grad, old) for p, old in zip(made, before, strict=True)) > 3
