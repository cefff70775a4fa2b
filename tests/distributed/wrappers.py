"""Models under PyTorch's own wrappers: FullyShardedDataParallel (FSDP1) and DistributedDataParallel."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradclip
from gradients import numbers, on_one_process, same_everywhere
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
SHARDED = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3))


def trained(model):
    """Return a model with the gradients of the mean over all processes, which each has its own share of."""
    share = numbers(4 * WORLD, 6, seed=7).chunk(WORLD)[dist.get_rank()]
    model(share).square().mean().backward()
    return model


def whole_gradients():
    model = network()
    model(numbers(4 * WORLD, 6, seed=7)).square().mean().backward()
    return [p.grad for p in model.parameters()]


def fsdp1(strategy, use_orig_params, model=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = FullyShardedDataParallel(
            model or network(),
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )
        return trained(wrapped)


def shards_of_fsdp1_need_a_process_group():
    alone, _ = on_one_process(whole_gradients(), 0.5)
    for strategy in SHARDED:
        for use_orig_params in (True, False):
            model = fsdp1(strategy, use_orig_params)
            before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            for parameters in (list(model.parameters()), [{"params": list(model.parameters()), "lr": 0.1}]):
                for call in (gradclip.grad_norm, lambda parameters: gradclip.clip_grad_norm_(parameters, 0.5)):
                    with pytest.raises(ValueError, match=r"FSDP1.*process_group=model\.process_group"):
                        call(parameters)
            grads = [p.grad for p in model.parameters()]
            assert all(x is y or torch.equal(x, y) for x, y in zip(grads, before, strict=True))
            norm = gradclip.clip_grad_norm_(model.parameters(), 0.5, process_group=model.process_group)
            same_everywhere(norm)
            torch.testing.assert_close(norm, alone, rtol=1e-5, atol=0)
            named = [{"params": list(model.parameters()), "process_group": model.process_group}]
            torch.testing.assert_close(gradclip.grad_norm(named), torch.tensor(0.5), rtol=1e-5, atol=0)


def fsdp1_around_some_layers():
    """Those that are wrapped are shards, the last is whole, as DistributedDataParallel would leave it."""
    model = network()
    model[0] = FullyShardedDataParallel(model[0], use_orig_params=True, device_id=torch.device("cpu"))
    trained(model)
    with pytest.raises(ValueError, match="FSDP1"):
        gradclip.clip_grad_norm_(model.parameters(), 0.5)
    with pytest.raises(ValueError, match="FSDP1"):
        gradclip.clip_grad_norm_(
            [{"params": list(model[2].parameters())}, {"params": list(model[0].parameters())}], 0.5
        )


def whole_parameters_of_fsdp1():
    alone, _ = on_one_process(whole_gradients(), 0.5)
    for use_orig_params in (True, False):
        model = fsdp1(ShardingStrategy.NO_SHARD, use_orig_params)
        for options in ({}, {"process_group": []}):
            norm = gradclip.grad_norm(model.parameters(), **options)
            torch.testing.assert_close(norm, alone, rtol=1e-5, atol=0)
    biases = [p for p in fsdp1(ShardingStrategy.NO_SHARD, True).parameters() if p.dim() == 1]
    wanted = gradclip.grad_norm(biases, process_group=[])
    torch.testing.assert_close(gradclip.global_norm([p.grad for p in biases]), wanted)


def fsdp2_says_it_all():
    model = trained(fully_shard(network(), mesh=init_device_mesh("cpu", (WORLD,))))
    alone, _ = on_one_process(whole_gradients(), 0.5)
    torch.testing.assert_close(gradclip.clip_grad_norm_(model.parameters(), 0.5), alone, rtol=1e-5, atol=0)


def replicas_of_ddp():
    alone, clipped = on_one_process(whole_gradients(), 0.1)
    for ord in (1, 2, 3, float("inf")):
        for options in ({"process_group": dist.group.WORLD}, {"mesh": init_device_mesh("cpu", (WORLD,))}):
            model = trained(DistributedDataParallel(network()))
            before = [p.grad.clone() for p in model.parameters()]
            with pytest.raises(ValueError, match=r"ranks 0, 1 are the same to the last bit.*leave out process_group"):
                gradclip.clip_grad_norm_(model.parameters(), 0.1, ord, **options)
            assert all(torch.equal(p.grad, x) for p, x in zip(model.parameters(), before, strict=True))
    torch.testing.assert_close(gradclip.clip_grad_norm_(model.parameters(), 0.1), alone, rtol=1e-5, atol=0)
    for p, y in zip(model.parameters(), clipped, strict=True):
        torch.testing.assert_close(p.grad, y, rtol=1e-4, atol=1e-7)


if __name__ == "__main__":
    run_all(globals())
