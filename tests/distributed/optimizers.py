"""Clipping within optimizers' steps and within the backward pass, of gradients that several processes hold."""

import math
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import gradclip
from gradclip import clip_at_step
from gradclip.integrations.torch import clip_in_backward
from gradients import numbers, same_everywhere
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3))


def sharded(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))


def backward(model, factor=1.0):
    share = numbers(4 * WORLD, 6, seed=7).chunk(WORLD)[dist.get_rank()]
    (factor * model(share).square().mean()).backward()


def shards_of_fsdp2_in_the_step():
    ours, theirs = sharded(network()), sharded(network())
    folded, after = (torch.optim.AdamW(model.parameters(), lr=0.1, fused=True) for model in (ours, theirs))
    clipping = clip_at_step(folded, 0.1, nonfinite="skip", fused=True)
    for factor in (1.0, 1e-4, 1.0):
        backward(ours, factor)
        backward(theirs, factor)
        norm = gradclip.clip_grad_norm_(theirs.parameters(), 0.1)
        folded.step()
        after.step()
        same_everywhere(clipping.norm)
        torch.testing.assert_close(clipping.norm, norm, rtol=1e-5, atol=0)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other.full_tensor(), rtol=1e-5, atol=1e-6)


def a_nan_on_one_process_skips_on_all():
    model = sharded(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    clip_at_step(optimizer, 0.1, nonfinite="skip", fused=True)
    backward(model)
    if dist.get_rank() == 0:
        next(model.parameters()).grad.to_local().fill_(math.nan)
    before = [p.full_tensor() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p.full_tensor(), x) for p, x in zip(model.parameters(), before, strict=True))


def stages_in_the_step():
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([(3.0, 4.0)[dist.get_rank() % 2]])
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    clipping = clip_at_step(optimizer, 1.0, process_group=dist.group.WORLD, fused=True)
    optimizer.step()
    assert clipping.norm.item() == 5.0
    torch.testing.assert_close(weight.detach(), torch.tensor([(-0.6, -0.8)[dist.get_rank() % 2]]))


def shards_of_fsdp2_in_the_backward_pass():
    model = sharded(network())
    clipping = clip_in_backward(model, 0.1)
    backward(model)
    sizes = {name: p.numel() for name, p in network().named_parameters()}
    for name, share in clipping.thresholds.items():
        assert math.isclose(share, 0.1 * math.sqrt(sizes[name] / sum(sizes.values())), rel_tol=1e-9)
        same_everywhere(clipping.norms[name])
        assert gradclip.grad_norm(dict(model.named_parameters())[name]) <= share
    torch.testing.assert_close(gradclip.grad_norm(model.parameters()), torch.tensor(0.1), rtol=1e-5, atol=0)


def shards_made_after_it_are_refused():
    model = network()
    clip_in_backward(model, 0.1)
    sharded(model)
    with pytest.raises(RuntimeError, match=r"0\.weight.*2\.bias: added or replaced since clip_in_backward was called"):
        backward(model)


def shards_that_a_forward_pass_has_gathered():
    model = sharded(network())
    with torch.no_grad():
        model(numbers(2, 6, seed=7))
    clip_in_backward(model, 0.1)
    for _ in range(2):
        backward(model)
    torch.testing.assert_close(gradclip.grad_norm(model.parameters()), torch.tensor(0.1), rtol=1e-5, atol=0)


def shards_that_are_unfrozen_after_it():
    model = network()
    model[0].requires_grad_(False)
    model = sharded(model)
    clipping = clip_in_backward(model, 0.1)
    for unfrozen in (False, True):
        model[0].requires_grad_(unfrozen)
        model.zero_grad()
        backward(model)
        torch.testing.assert_close(gradclip.grad_norm(model.parameters()), torch.tensor(0.1), rtol=1e-5, atol=0)
        assert len(clipping.thresholds) == (4 if unfrozen else 2)
    clipping = clip_in_backward(model, 0.05)
    model.zero_grad()
    backward(model)
    torch.testing.assert_close(gradclip.grad_norm(model.parameters()), torch.tensor(0.05), rtol=1e-5, atol=0)


def what_a_distributed_gradient_shares_is_not_written():
    mesh = init_device_mesh("cpu", (WORLD,))
    for placement in (Shard(0), Replicate()):
        parts = torch.nn.Parameter(distribute_tensor(torch.zeros(2 * WORLD, 3), mesh, [placement]))
        beside = torch.nn.Parameter(torch.zeros(parts.to_local().shape))
        clip_in_backward({"parts": parts, "beside": beside}, {"parts": 1.0, "beside": math.inf})
        last = beside * 2.0  # what is computed first has its gradient last
        (5.0 * (parts.to_local() + last)).sum().backward()
        assert (beside.grad == 10.0).all()
        torch.testing.assert_close(gradclip.grad_norm([parts]), torch.tensor(1.0), rtol=1e-5, atol=0)


def averages_of_ddp_after_the_backward_pass():
    model = DistributedDataParallel(network())
    clip_in_backward(model, 0.1)
    backward(model)
    norm = gradclip.grad_norm(model.parameters())
    same_everywhere(norm)
    assert 0.01 < norm <= 0.1 * (1 + 1e-6)


if __name__ == "__main__":
    run_all(globals())
