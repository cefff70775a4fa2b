"""Gradients laid out over processes, and what one process makes of the same gradients."""

import math
from contextlib import contextmanager
from fractions import Fraction
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import gradclip
import gradclip._src.backends.torch.framework as torch_backend
from gradclip._src.distributed.process_groups import ProcessGroups

ORDERS = [1, 2, 3, math.inf, -math.inf]
ERRORS = {
    torch.float64: 1e-14,
    torch.complex64: 4e-7,
    torch.float32: 2e-7,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}


def numbers(*shape, seed=0, dtype=torch.float32, scale=1.0):
    """Return the same random numbers in every process, none of them zero."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ((x + torch.sign(x)) * scale).to(dtype)


def terms(x, mesh, dims):
    """Return this process's term of a sum over some dimensions of a mesh: 2x, -x and zeros, exact in any order."""
    if math.prod(map(mesh.size, dims)) == 1:
        return x
    coordinates = mesh.get_coordinate()
    index = 0
    for dim in dims:
        index = index * mesh.size(dim) + coordinates[dim]
    return x * (2.0, -1.0)[index] if index < 2 else torch.zeros_like(x)


def laid_out(x, mesh, placements):
    """Return a distributed tensor that holds `x`, with terms of a sum where a placement is `Partial`."""
    partial = [dim for dim, placement in enumerate(placements) if placement.is_partial()]
    if not partial:
        return distribute_tensor(x.clone(), mesh, placements)
    settled = [Replicate() if placement.is_partial() else placement for placement in placements]
    local = distribute_tensor(x.clone(), mesh, settled).to_local()
    return DTensor.from_local(
        terms(local, mesh, partial), mesh, placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def holder(grad):
    return SimpleNamespace(grad=grad)


def parameter(x, mesh=None, placements=None, *, like=None):
    """Return a parameter with the gradient `x`, laid out so; `like` is how the parameter itself lies."""
    if mesh is None:
        p = torch.nn.Parameter(torch.zeros_like(x))
        p.grad = x.clone()
        return p
    p = torch.nn.Parameter(distribute_tensor(torch.zeros_like(x), mesh, like or placements))
    p.grad = laid_out(x, mesh, placements)
    return p


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def on_one_process(grads, max_norm, ord=2, **options):
    """Return the norm that one process finds, and the clipped gradients."""
    holders = [holder(x.clone()) for x in grads]
    norm = gradclip.clip_grad_norm_(holders, max_norm, ord, **options)
    return norm, [one.grad for one in holders]


def refused(kind, words, parameters, *arguments, call=gradclip.clip_grad_norm_, **options):
    """Check that the call raises such an error, and changes nothing."""
    before = [local(p).clone() for p in parameters]
    with pytest.raises(kind, match=words):
        call(parameters, *arguments, **options)
    assert all(torch.equal(local(p), x) for p, x in zip(parameters, before, strict=True))


def local(p):
    return p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad


def same_everywhere(x):
    """Check that all processes hold the same bits."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (str(x.dtype), x.numpy().tobytes()))
    assert len(set(gathered)) == 1, gathered


def close(found, expected, ord=2, dtype=None):
    """Compare; for powers that are no squares the coefficient is lowered by four times what `norms` allows for them."""
    error = max(ERRORS[dtype or found.dtype], 0.0 if ord in (1, 2) or math.isinf(ord) else 2.0**-39)
    torch.testing.assert_close(found, expected, rtol=error, atol=0, equal_nan=True)


def holders_of_the_same(grad):
    """Return how many processes hold the same part of a gradient as this one."""
    if not isinstance(grad, DTensor):
        return dist.get_world_size()
    mesh = grad.device_mesh
    replicated = [mesh.size(dim) for dim, placement in enumerate(grad.placements) if placement.is_replicate()]
    return dist.get_world_size() // mesh.size() * math.prod(replicated)


def check_bound(grads, max_norm, ord):
    """Check in exact arithmetic that what all processes hold has at most this norm; each gradient is passed once."""
    powers = [Fraction(0)]
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        magnitudes = [abs(Fraction(x)) for x in local.double().flatten().tolist()]
        same = 1 if math.isinf(ord) else holders_of_the_same(grad)
        powers += magnitudes if math.isinf(ord) else [magnitude**ord / same for magnitude in magnitudes]
    merge = max if math.isinf(ord) else sum
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, merge(powers))
    assert merge(gathered) <= (Fraction(max_norm) if math.isinf(ord) else Fraction(max_norm) ** ord)


def check(parameters, full, ord=2, share=0.5, nonfinite="propagate", **options):
    """Compare clipping `parameters`, which hold `full` together, with clipping `full` in one process."""
    alone = gradclip.grad_norm([holder(x) for x in full], ord)
    max_norm = float(alone) * share if torch.isfinite(alone) else 1.0
    expected, clipped = on_one_process(full, max_norm, ord, nonfinite=nonfinite)
    close(gradclip.grad_norm(parameters, ord, **options), alone)
    norm = gradclip.clip_grad_norm_(parameters, max_norm, ord, nonfinite=nonfinite, **options)
    assert type(norm) is torch.Tensor
    same_everywhere(norm)
    close(norm, expected)
    return clipped


def check_all(parameters, full, ord=2, share=0.5, **options):
    """Check the norm and every clipped gradient, all of which this process has a part of."""
    clipped = check(parameters, full, ord, share, **options)
    for p, y in zip(parameters, clipped, strict=True):
        close(whole(p.grad), y, ord)


@contextmanager
def unseen():
    """Take the path of accelerators, on which no value is looked at."""
    hidden = mock.patch.object(torch_backend, "in_host_memory", return_value=False)
    with hidden as asked, mock.patch.object(ProcessGroups, "on_host", False):
        yield
    assert asked.called
