"""Guards of optimizers that several processes step: replicas should get the same gradients."""

import os
import time
import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradclip
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def train(model, steps=12, guarded=True, synced=True, skip_on=None, wait=0.0, **settings):
    """Take steps, each process with its own data, and return what the guard says."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watched = gradclip.guard(optimizer, 1.0, every=4, **settings) if guarded else None
    generator = torch.Generator().manual_seed(dist.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gradclip.ClippingWarning)
        for step in range(steps):
            optimizer.zero_grad()
            for last in (False, True):
                with nullcontext() if last and synced else no_sync(model):
                    (model(torch.randn(8, 4, generator=generator)) * (5.0 + dist.get_rank())).square().mean().backward()
            gradclip.clip_grad_norm_(model.parameters(), 1.0, process_group=[])
            if step != 5 or dist.get_rank() != skip_on:
                optimizer.step()
            time.sleep(wait)
    if watched is None:
        return []
    watched.remove()
    return watched.reports


def no_sync(model):
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def replicas_that_agree():
    assert train(DistributedDataParallel(network())) == []


def replicas_that_nothing_keeps_together():
    reports = train(network(), steps=40, wait=0.01)
    assert [one.kind for one in reports] == ["ranks_disagree"], reports
    assert "although both hold the same parameters" in reports[0].sentence
    assert "rank 1 got other gradients than rank 0" in reports[0].sentence
    assert "DistributedDataParallel" in reports[0].fix
    dist.barrier()


def gradients_that_are_not_averaged():
    """The last micro-batch is within no_sync(), too. After clipping, all have the same norm, but not the gradients."""
    reports = train(DistributedDataParallel(network()), 40, synced=False, wait=0.01)
    assert [one.kind for one in reports] == ["ranks_disagree"], reports
    assert "their norms are 1 and 1." in reports[0].sentence
    dist.barrier()


def a_guard_on_one_process_waits_for_nobody():
    alone = dist.get_rank() == 0
    assert train(DistributedDataParallel(network()), guarded=alone) == []
    if not alone:  # so that the next guards of both find each other
        gradclip.guard(torch.optim.SGD(network().parameters())).remove()
    dist.barrier()


def a_process_that_skips_a_step_stops_nobody():
    train(network(), steps=40, skip_on=1)
    dist.barrier()


def processes_with_other_parameters():
    assert train(network(seed=dist.get_rank()), steps=20) == []
    assert train(network(), steps=20, replicas=False) == []
    assert train(network(), steps=20, process_group=[]) == []


def a_group_of_one_process():
    groups = [dist.new_group([rank]) for rank in range(WORLD)]
    assert train(network(), steps=20, replicas=groups[dist.get_rank()]) == []


def sharded_parameters():
    """FSDP2 accumulates by itself, and all processes measure together."""
    right = [("zero", "pass", "clip", "step"), ("zero", "pass", "pass", "clip", "step")]
    wrong = {
        "after_step": ("zero", "pass", "step", "clip"),
        "before_backward": ("zero", "clip", "pass", "step"),
        "clipped_twice": ("zero", "pass", "clip", "pass", "clip", "step"),
        "not_clipped": ("zero", "pass", "step"),
    }
    for clip in (gradclip.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        for order in right:
            assert sharded(clip, order) == []
        for kind, order in wrong.items():
            assert sharded(clip, order) == [kind], (kind, clip)


def an_overflow_on_one_process_makes_nobody_wait():
    """GradScaler leaves the step out there alone. All go on to look at the same steps."""
    mine = torch.tensor([3.0, 4.0]) * (1 + dist.get_rank())
    for spoilt in ((0,), (1,), (2, 3), (0, 3, 7)):
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        watched = gradclip.guard(optimizer, 100.0, every=4, process_group=dist.group.WORLD)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(14):
            optimizer.zero_grad()
            infinite = step in spoilt and dist.get_rank() == WORLD - 1
            scaler.scale(weight @ (mine * torch.inf if infinite else mine)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert watched.steps == 14 - len(spoilt) * (dist.get_rank() == WORLD - 1)
        assert watched.looks in (4, 5)
        assert watched.reports == []
        watched.remove()


def sharded(clip, order):
    """Return the kinds of mistakes found in a loop that does these things in this order."""
    model = fully_shard(network(), mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watched = gradclip.guard(optimizer, 1.0, every=4)
    acts = {
        "zero": optimizer.zero_grad,
        "pass": lambda: (model(torch.randn(8, 4)) * 30.0).square().mean().backward(),
        "clip": lambda: clip(model.parameters(), 1.0),
        "step": optimizer.step,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(5):
            for act in order:
                acts[act]()
    watched.remove()
    return [one.kind for one in watched.reports]


if __name__ == "__main__":
    run_all(globals())
