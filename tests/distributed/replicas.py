"""Gradients that are the same in several processes, to which a group is named all the same: they would count twice."""

import math
import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import gradclip
from gradients import check, close, holder, numbers, on_one_process, parameter, refused
from meshes import line, mesh
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def replicas_under_a_process_group():
    """As after DistributedDataParallel: not only where one norm counts, but in one of two dimensions, too."""
    same, other = numbers(40, seed=1), numbers(40, seed=dist.get_rank())
    pairs = numbers(40, seed=mesh()["dp"].get_local_rank())
    for ord in (1, 2, 3, math.inf, -math.inf):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            p = parameter(same.to(dtype))
            refused(ValueError, "are the same to the last bit.*count 4 times", [p], 1.0, ord, mesh=line())
        refused(
            ValueError, "ranks 0, 1, 2, 3 are the same", [parameter(same)], ord, call=gradclip.grad_norm, mesh=line()
        )
        words = f"ranks {'0, 1' if dist.get_rank() < 2 else '2, 3'} are the same"
        refused(ValueError, words, [parameter(pairs)], 1.0, ord, mesh=mesh())
        full = [numbers(40, seed=seed) for seed in range(4)]
        alone, _ = on_one_process(full, math.inf, ord)
        close(gradclip.clip_grad_norm_([parameter(other)], 1.0, ord, mesh=line()), alone, ord)


def what_may_be_the_same():
    """Ones, signs, zeros, single numbers; the same magnitudes with other signs; the same but for one element."""
    rank = dist.get_rank()
    signs, last = numbers(40, seed=rank).sign(), numbers(40, seed=1)
    last[-1] = rank + 1.0
    flipped = numbers(40, seed=1) * (1 if rank else -1)
    for x in (torch.ones(7), signs, torch.zeros(3), torch.tensor([2.5]), last, flipped, torch.tensor([0.0, 3.0])):
        p = parameter(x)
        gathered = [None] * WORLD
        dist.all_gather_object(gathered, x)
        for ord in (1, 2, math.inf):
            alone, _ = on_one_process(gathered, math.inf, ord)
            close(gradclip.clip_grad_norm_([p], math.inf, ord, process_group=dist.group.WORLD), alone)


def replicas_of_distributed_tensors():
    """Each pair holds the whole in shards, and the pairs are named beside them."""
    tp, dp = mesh()["tp"], mesh()["dp"]
    p = parameter(numbers(8, seed=1), tp, [Shard(0)])
    refused(ValueError, "are the same to the last bit", [p], 1.0, process_group=dp.get_group())
    q = parameter(numbers(8, seed=dp.get_local_rank()), tp, [Shard(0)])
    check([q], [numbers(8, seed=0), numbers(8, seed=1)], process_group=dp.get_group())
    assert holder(q.grad).grad is q.grad


if __name__ == "__main__":
    run_all(globals())
