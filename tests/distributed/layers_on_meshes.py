"""Layers and units on meshes of two dimensions, on several meshes at once, and of models."""

import math

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import gradclip
from gradients import holder, numbers, parameter, whole
from layerwise import CALLS, by_layer, by_unit, close, compare
from meshes import line, mesh
from worker import run_all

KINDS = (Shard(0), Shard(1), Replicate(), Partial())


def pairs_of_placements():
    for call in CALLS:
        for ord in (2, -math.inf):
            full, params = [], []
            for i, first in enumerate(KINDS):
                for j, second in enumerate(KINDS):
                    full.append(numbers(6, 5, seed=10 * i + j, dtype=(torch.float32, torch.float64)[i % 2]))
                    params.append(parameter(full[-1], mesh(), [first, second], like=[Shard(0), Shard(1)]))
            compare(call, params, full, ord=ord)


def one_reduction_over_each_group():
    for call in CALLS:
        pairs = [(first, second) for first in KINDS[:3] for second in KINDS[:3]]
        params = [parameter(numbers(6, 5, seed=seed), mesh(), pair) for seed, pair in enumerate(pairs)]
        for some in (params, params[:1], params * 3):
            with CommDebugMode() as counted:
                call(some, 1.0)
            assert counted.get_total_counts() == 2, counted.get_comm_counts()


def several_meshes_and_plain_tensors():
    full = [numbers(7, 4, seed=seed, dtype=(torch.float32, torch.bfloat16)[seed % 2]) for seed in range(5)]
    for call in CALLS:
        params = [
            parameter(full[0], mesh(), [Shard(0), Shard(1)]),
            parameter(full[1], line(), [Shard(0)]),
            parameter(full[2], mesh()["tp"], [Shard(1)]),
            parameter(full[3], mesh()["dp"], [Shard(0)]),
            parameter(full[4]),
        ]
        compare(call, params, full)


def strided_shards():
    dp, tp = mesh().get_coordinate()
    full = numbers(5, 4, seed=1)
    local = full.chunk(2)[tp].chunk(2)[dp].clone()
    laid = [_StridedShard(0, split_factor=2), Shard(0)]
    for call in (by_layer, by_unit):
        grad = DTensor.from_local(local.clone(), mesh(), laid, run_check=False, shape=full.shape, stride=full.stride())
        alone = holder(full.clone())
        (expected,), (norm,) = call([alone], 2.0), call([holder(grad)], 2.0)
        if call is by_layer:
            close(norm, expected)
        else:
            assert norm.shape == expected.shape
            assert norm.placements == grad.placements
            close(norm.to_local(), expected.chunk(2)[tp].chunk(2)[dp])
        close(grad.to_local(), alone.grad.chunk(2)[tp].chunk(2)[dp])


def experts_and_groups():
    """Experts are split over a pair of processes, along the elements of each row; the rest is whole."""
    full = [numbers(3, 4, seed=1), numbers(2, 2, seed=2)]
    place = mesh()["tp"].get_local_rank()
    for call in CALLS:
        params = [torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(2, 2))]
        weights = [x.abs().sqrt() - 0.25 for x in full]
        mine = slice(2 * place, 2 * place + 2)
        alone = [torch.nn.Parameter(x.clone()) for x in weights]
        for p, x in zip(alone, full, strict=True):
            p.grad = x.clone()
        params[0].data, params[0].grad = weights[0][:, mine].clone(), full[0][:, mine].clone()
        params[1].data, params[1].grad = weights[1].clone(), full[1].clone()
        wanted = call(alone, 2.0)
        found = call([{"params": params[:1], "mesh": mesh()["tp"]}, {"params": params[1:]}], 2.0)
        for norm, expected in zip(found, wanted, strict=True):
            close(norm, expected)
        close(params[0].grad, alone[0].grad[:, mine])
        close(params[1].grad, alone[1].grad)


def trained(model, make):
    """Return the model, laid out by `make`, after a backward pass."""
    torch.manual_seed(0)
    built = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5))
    model = make(built)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    model(x).square().sum().backward()
    return model


def sharded_twice(model):
    parallelize_module(model, mesh()["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh()["dp"])
    return fully_shard(model, mesh=mesh()["dp"])


def offloaded(model):
    policy = CPUOffloadPolicy(pin_memory=False)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=line(), offload_policy=policy)
    return fully_shard(model, mesh=line(), offload_policy=policy)


def models_as_on_one_process():
    """FSDP2 with tensor parallelism, and FSDP2 whose shards are moved to the CPU; all of them see the same batch."""
    for make in (sharded_twice, offloaded):
        for call in (*CALLS, by_global_norm):
            alone, model = trained(None, lambda model: model), trained(None, make)
            wanted = call(list(alone.parameters()), 0.5)
            with CommDebugMode() as counted:
                found = call(list(model.parameters()), 0.5)
            assert counted.get_total_counts() == (2 if make is sharded_twice else 1), counted.get_comm_counts()
            for norm, expected in zip(found, wanted, strict=True):
                torch.testing.assert_close(whole(norm), expected, rtol=1e-5, atol=1e-7)
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-7)


def by_global_norm(params, max_norm):
    return [gradclip.clip_grad_norm_(params, max_norm)]


if __name__ == "__main__":
    run_all(globals())
