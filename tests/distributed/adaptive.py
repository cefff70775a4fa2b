"""Cases of thresholds that follow, where processes hold parts of the gradients."""

import math
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import gradclip
from gradients import close, numbers, parameter, same_everywhere, unseen
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RULE = gradclip.QuantileRule(factor=1.1, window=4)


def norms_of_steps(clip):
    """Take ten steps; one process has NaN at the third, all have zeros at the fourth."""
    max_norm = gradclip.AdaptiveThreshold(RULE)
    for step in range(10):
        full = numbers(8, seed=step, scale=100.0 if step == 7 else 1.0)
        if step == 2:
            full[-1] = math.nan
        clip(full * (step != 3), max_norm)
        same_everywhere(torch.as_tensor(max_norm.next_max_norm))
    return max_norm


def of_one_process():
    return norms_of_steps(
        lambda full, max_norm: gradclip.clip_grad_norm_([parameter(full)], max_norm, nonfinite="drop", process_group=[])
    )


def check_like_one_process(found):
    expected = of_one_process()
    close(torch.as_tensor(float(found.max_norm)), torch.as_tensor(float(expected.max_norm)))
    counts = [(one.steps, one.num_clipped, one.num_skipped, int(one.history.count)) for one in (found, expected)]
    assert counts[0] == counts[1]
    assert counts[0][0] == 10
    assert counts[0][2] == 1


def distributed_tensors():
    mesh = init_device_mesh("cpu", (WORLD,))

    def clip(full, max_norm):
        p = parameter(full, mesh, [Shard(0)])
        gradclip.clip_grad_norm_([p], max_norm, nonfinite="drop")
        assert p.grad.full_tensor().norm() <= max_norm.max_norm

    check_like_one_process(norms_of_steps(clip))


def distributed_tensors_that_nobody_looks_at():
    mesh = init_device_mesh("cpu", (WORLD,))

    def clip(full, max_norm):
        with unseen():
            gradclip.clip_grad_norm_([parameter(full, mesh, [Shard(0)])], max_norm, nonfinite="drop")

    check_like_one_process(norms_of_steps(clip))


def process_groups():
    def clip(full, max_norm):
        mine = full[dist.get_rank() :: WORLD]
        gradclip.clip_grad_norm_([parameter(mine)], max_norm, nonfinite="drop", process_group=dist.group.WORLD)

    check_like_one_process(norms_of_steps(clip))


def thresholds_that_differ_are_an_error_and_not_observed():
    max_norm = gradclip.AdaptiveThreshold(gradclip.QuantileRule(initial=1.0 + dist.get_rank()))
    with pytest.raises(ValueError, match=r"max_norm is 1\.0 on rank 0"):
        gradclip.clip_grad_norm_(
            [parameter(numbers(3, seed=dist.get_rank()))], max_norm, process_group=dist.group.WORLD
        )
    assert max_norm.steps == 0


def what_a_holder_refuses_reaches_the_others():
    max_norm = gradclip.AdaptiveThreshold()
    mine = numbers(3, seed=dist.get_rank())
    gradclip.clip_grad_norm_([parameter(mine)], max_norm, process_group=dist.group.WORLD)
    ord, kind, words = (
        (1, ValueError, "has observed norms of ord=2") if dist.get_rank() else (2, RuntimeError, "rank 1")
    )
    with pytest.raises(kind, match=words):
        gradclip.clip_grad_norm_((p for p in [parameter(mine)]), max_norm, ord, process_group=dist.group.WORLD)
    assert max_norm.steps == 1


def each_layer_follows_the_norm_of_its_shards():
    """Two layers, sharded, replicated by a group, or both; one process has no gradient of the second at all."""
    mesh, alone = init_device_mesh("cpu", (WORLD,)), gradclip.AdaptiveThreshold(RULE)
    shards, split = gradclip.AdaptiveThreshold(RULE), gradclip.AdaptiveThreshold(RULE)
    for step in range(10):
        full = [numbers(8, seed=2 * step + place, scale=100.0 if step == 7 else 1.0) for place in range(2)]
        full[1][WORLD - 1 :: WORLD] = 0.0
        if step == 2:
            full[0][-1] = math.nan
        whole, sharded = [parameter(x) for x in full], [parameter(x, mesh, [Shard(0)]) for x in full]
        mine = [parameter(x[dist.get_rank() :: WORLD].clone()) for x in full]
        if dist.get_rank() == WORLD - 1:
            mine[1].grad = None
        gradclip.clip_grad_layer_norm_(whole, alone, nonfinite="drop", process_group=[])
        gradclip.clip_grad_layer_norm_(sharded, shards, nonfinite="drop")
        gradclip.clip_grad_layer_norm_(mine, split, nonfinite="drop", process_group=dist.group.WORLD)
        for one in (shards, split):
            same_everywhere(torch.as_tensor(one.next_max_norm))
            close(torch.as_tensor(one.next_max_norm), torch.as_tensor(alone.next_max_norm))
            assert one.history.count.tolist() == alone.history.count.tolist()
        for p, q in zip(whole, sharded, strict=True):
            close(q.grad.full_tensor(), p.grad)
    assert (alone.steps, alone.num_skipped, shards.num_clipped, split.num_clipped) == (10, 1, *[alone.num_clipped] * 2)


if __name__ == "__main__":
    run_all(globals())
