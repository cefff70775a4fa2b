"""Cases on meshes of two dimensions, on several meshes at once, with parameter groups, and on models."""

import math
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import gradclip
from gradclip._src.backends.torch.distributed import layouts
from gradients import ORDERS, check, check_all, close, holder, numbers, on_one_process, parameter, same_everywhere
from meshes import line, mesh
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def every_pair_of_placements(kinds):
    full, parameters = [], []
    for i, first in enumerate(kinds):
        for j, second in enumerate(kinds):
            full.append(numbers(6, 5, seed=10 * i + j, dtype=(torch.float32, torch.float64)[i % 2]))
            parameters.append(parameter(full[-1], mesh(), [first, second], like=[Shard(0), Shard(1)]))
    return full, parameters


def pairs_of_placements():
    for ord in (2, 3, -math.inf):
        full, parameters = every_pair_of_placements([Shard(0), Shard(1), Replicate(), Partial()])
        check_all(parameters, full, ord)


def one_call_reduces_once_over_each_group():
    for ord in (2, math.inf):
        kinds = [Shard(0), Shard(1), Replicate()]
        _, parameters = every_pair_of_placements(kinds)
        for some in (parameters, parameters[:1], parameters * 20):
            with CommDebugMode() as calls:
                gradclip.clip_grad_norm_(some, 1.0, ord)
            assert calls.get_total_counts() == 2, calls.get_comm_counts()


def several_meshes_and_plain_tensors():
    for ord in ORDERS:
        full = [numbers(7, 4, seed=seed, dtype=(torch.float32, torch.bfloat16)[seed % 2]) for seed in range(5)]
        parameters = [
            parameter(full[0], mesh(), [Shard(0), Shard(1)]),
            parameter(full[1], line(), [Shard(0)]),
            parameter(full[2], mesh()["tp"], [Shard(1)]),
            parameter(full[3], mesh()["dp"], [Shard(0)]),
            parameter(full[4]),
        ]
        check_all(parameters, full, ord)


def hybrid_sharding():
    full = [numbers(7, 4, seed=1), numbers(4, seed=2)]
    for ord in ORDERS:
        check_all([parameter(x, mesh(), [Replicate(), Shard(0)]) for x in full], full, ord)


def strided_shards():
    """FSDP over rows that tensor parallelism has split before: 5 rows are 2, 1 and 1, 1."""
    dp, tp = mesh().get_coordinate()
    full = numbers(5, 4, seed=1)
    local = full.chunk(2)[tp].chunk(2)[dp].clone()
    laid = [_StridedShard(0, split_factor=2), Shard(0)]
    for ord in ORDERS:
        grad = DTensor.from_local(local.clone(), mesh(), laid, run_check=False, shape=full.shape, stride=full.stride())
        clipped = check([holder(grad)], [full], ord)
        close(grad.to_local(), clipped[0].chunk(2)[tp].chunk(2)[dp])


def expert_parallel():
    """Experts are split over pairs of processes by hand, the rest is the same on all four."""
    experts, rest = numbers(2, 6, seed=1), numbers(5, seed=2)
    ep = mesh()["tp"]
    for group in ({"process_group": ep.get_group()}, {"mesh": ep}, {"process_group": [ep.get_group()], "lr": 0.1}):
        for ord in ORDERS:
            mine = [parameter(experts[ep.get_local_rank()]), parameter(rest)]
            groups = [{"params": mine[:1], **group}, {"params": mine[1:]}]
            alone, clipped = on_one_process([experts, rest], 2.0, ord)
            norm = gradclip.clip_grad_norm_(groups, 2.0, ord)
            same_everywhere(norm)
            close(norm, alone)
            close(mine[0].grad, clipped[0][ep.get_local_rank()], ord)
            close(mine[1].grad, clipped[1], ord)


def experts_in_one_stage_only():
    """Two stages of two processes; the second has experts, which are split over it, and the first has nothing else."""
    stages, stage = mesh()["dp"], mesh()["dp"].get_local_rank()
    full = [numbers(4, 3, seed=1), numbers(2, 5, seed=2), numbers(3, seed=3)]
    for ord in ORDERS:
        within = mesh()["tp"]
        first = [{"params": [parameter(full[0], within, [Shard(0)])]}]
        second = [
            {"params": [parameter(full[1][within.get_local_rank()])], "mesh": [within, stages]},
            {"params": [parameter(full[2])]},
        ]
        check([first, second][stage], full, ord, process_group=stages.get_group())


def policies_agree():
    for bad in (math.nan, math.inf):
        for ord in ORDERS:
            full = [numbers(8, 2, seed=1), numbers(8, seed=2)]
            full[0][5, 0] = bad
            for nonfinite in ("propagate", "zero", "drop"):
                parameters = [parameter(full[0], mesh(), [Shard(0), Shard(1)]), parameter(full[1])]
                check_all(parameters, full, ord, nonfinite=nonfinite)


def policies_agree_on_a_replica_that_is_bad_on_one_process():
    """A plain gradient, which all should hold alike, is NaN on the first process only."""
    good = torch.tensor([1.0, 2.0])
    for ord in ORDERS:
        for nonfinite in ("propagate", "zero", "drop", "raise"):
            p, plain = parameter(numbers(2 * WORLD, seed=1), line(), [Shard(0)]), parameter(good)
            if dist.get_rank() == 0:
                plain.grad[1] = math.nan
            if nonfinite == "raise":
                with pytest.raises(FloatingPointError, match=r"in 1 leaf: rank 0: parameters\[1\].grad: 1 NaN"):
                    gradclip.clip_grad_norm_([p, plain], 0.5, ord, nonfinite=nonfinite)
                continue
            norm = gradclip.clip_grad_norm_([p, plain], 0.5, ord, nonfinite=nonfinite)
            assert norm.isfinite() == (nonfinite == "zero")
            for grad in (p.grad.to_local(), plain.grad):
                assert {"propagate": grad.isnan().all(), "zero": grad.isfinite().all(), "drop": not grad.any()}[
                    nonfinite
                ]


def raise_raises_everywhere():
    full = [numbers(8, 2, seed=1), numbers(8, seed=2)]
    full[0][7, 1] = math.nan
    parameters = [parameter(full[1]), parameter(full[0], mesh(), [Shard(0), Shard(1)])]
    before = [p.grad for p in parameters]
    with pytest.raises(FloatingPointError, match=r"in 1 leaf: rank 3: parameters\[1\].grad: 1 NaN, 0 infinite of 4"):
        gradclip.clip_grad_norm_(parameters, 1.0, nonfinite="raise")
    assert all(p.grad is grad for p, grad in zip(parameters, before, strict=True))
    assert torch.equal(parameters[0].grad, full[1])


def a_mistake_on_one_process_ends_the_call_on_all():
    p = parameter(numbers(8, seed=1), mesh(), [Shard(0), Replicate()])
    wrong = holder(torch.ones(2, dtype=torch.int64 if dist.get_rank() == 2 else torch.float32))
    kind, words = (TypeError, "dtype int64") if dist.get_rank() == 2 else (RuntimeError, "rank 2: TypeError.*int64")
    for nonfinite in ("propagate", "zero", "raise"):
        with pytest.raises(kind, match=words):
            gradclip.clip_grad_norm_([p, wrong], 1.0, nonfinite=nonfinite, process_group=dist.group.WORLD)
        with pytest.raises(kind, match=words):
            gradclip.grad_norm([p, wrong], process_group=dist.group.WORLD)
    assert torch.equal(p.grad.full_tensor(), numbers(8, seed=1))


def a_partial_gradient_stays_when_an_error_is_raised():
    full = numbers(8, 2, seed=1)
    full[0, 0] = math.nan
    p = parameter(full, mesh(), [Partial(), Shard(0)], like=[Shard(0), Shard(0)])
    grad = p.grad
    with pytest.raises(FloatingPointError):
        gradclip.clip_grad_norm_([p], 1.0, nonfinite="raise")
    assert p.grad is grad


def equal_meshes_are_looked_at_once():
    """FSDP2 makes a mesh for each parameter that tensor parallelism has split before."""
    model = parallelize_module(network(), mesh()["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    parameters = list(fully_shard(model, mesh=mesh()["dp"]).parameters())
    assert len({id(p.device_mesh) for p in parameters}) > 2
    assert len({numbered for numbered, _ in layouts(parameters)}) == 1


def groups_in_different_orders_are_refused():
    dp, tp = mesh()["dp"], mesh()["tp"]
    groups = [{"params": [parameter(numbers(2))], "mesh": named} for named in ([dp, tp], [tp, dp])]
    with pytest.raises(ValueError, match="same order everywhere"):
        gradclip.clip_grad_norm_(groups, 1.0)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3))


def gradients_of(model, x):
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


def check_model(model):
    """Compare with one process; the batch is the same for all, so that averaged gradients are those of one process."""
    x = numbers(4, 6, seed=7)
    full = gradients_of(network(), x)
    alone, clipped = on_one_process(full, 0.5)
    gradients_of(model, x)
    norm = gradclip.clip_grad_norm_(model.parameters(), 0.5)
    same_everywhere(norm)
    torch.testing.assert_close(norm, alone, rtol=1e-5, atol=0)
    for p, y in zip(model.parameters(), clipped, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), y, rtol=1e-4, atol=1e-6)


def models_under_fsdp():
    for laid in (line(), mesh()):
        model = network()
        fully_shard(model[0], mesh=laid)
        check_model(fully_shard(model, mesh=laid))


def models_under_tensor_parallelism_and_fsdp():
    model = parallelize_module(network(), mesh()["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    check_model(fully_shard(model, mesh=mesh()["dp"]))


if __name__ == "__main__":
    run_all(globals())
