"""Gradients with layouts drawn at random, the same in every process, beside one process."""

import math
import os
import random

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import gradclip
from gradclip._src.passed.parameters import may_lack_gradients
from gradients import check_bound, close, holder, numbers, on_one_process, parameter, same_everywhere
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
DRAWS = int(os.environ.get("DRAWS", "40"))
FIRST_DRAW = int(os.environ.get("FIRST_DRAW", "0"))
ORDERS = [1, 1.5, 2, 3, 8, math.inf, -math.inf]


def meshes(size=WORLD):
    flat = init_device_mesh("cpu", (size,))
    square = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))
    return [flat, square, square["a"], square["b"], init_device_mesh("cpu", (size // 2, 2)), None]


def drawn_gradient(rng, among, seed):
    """Return a gradient and a parameter that holds it, laid out in one of several ways."""
    shape = [rng.choice([0, 1, 2, 3, 5, 8, 17]) for _ in range(rng.randint(1, 3))]
    dtype = rng.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16])
    scale = 10.0 ** rng.uniform(-30, 30) if dtype in (torch.float32, torch.float64) else 1.0
    full = numbers(*shape, seed=seed, dtype=dtype, scale=scale)
    mesh = rng.choice(among)
    if mesh is None:
        return full, parameter(full)

    def placements(kinds):
        return [rng.choice(kinds) for _ in range(mesh.ndim)]

    shards = [Shard(dim) for dim in range(len(shape))]
    partial = [Partial()] if full.double().abs().sum() < 1e4 else []
    return full, parameter(full, mesh, placements([*shards, Replicate(), *partial]), like=placements(shards))


def without_part_of(rank, full, p):
    """Take this gradient from one process, and return the whole without what that one held."""
    laid = distribute_tensor(full.clone(), p.grad.device_mesh, p.grad.placements)
    if dist.get_rank() == rank:
        laid.to_local().zero_()
        p.grad = None
    return laid.full_tensor()


def split_over_all(p):
    grad = p.grad
    return isinstance(grad, DTensor) and grad.device_mesh.size() == WORLD and all(x.is_shard() for x in grad.placements)


def layouts_agree_with_one_process():
    among, lost = meshes(), 0
    for seed in range(FIRST_DRAW, FIRST_DRAW + DRAWS):
        rng = random.Random(seed)
        drawn = [drawn_gradient(rng, among, 1000 * seed + i) for i in range(rng.randint(1, 6))]
        missing = [p for _, p in drawn if rng.random() < 0.2]
        for p in missing:
            p.grad = None
        kept = [(full, p) for full, p in drawn if p.grad is not None]
        if rng.random() < 0.3 and kept:
            drawn.append((None, kept[0][1]))
        ord, share = rng.choice(ORDERS), rng.choice([0.1, 0.9, 2.0])
        if ord != -math.inf:
            some = [i for i, (_, p) in enumerate(kept) if rng.random() < 0.8 and split_over_all(p)]
            for i in some:
                kept[i] = (without_part_of(rng.randrange(WORLD), *kept[i]), kept[i][1])
            lost += len(some)
        compare([p for _, p in drawn], kept, ord, share)
    assert lost > DRAWS // 10 or FIRST_DRAW


def compare(parameters, kept, ord, share):
    full = [x for x, _ in kept]
    alone = gradclip.grad_norm([holder(x) for x in full], ord) if full else torch.zeros(())
    max_norm = float(alone) * share if torch.isfinite(alone) else 1.0
    with may_lack_gradients(parameters):
        norm = gradclip.clip_grad_norm_(parameters, max_norm, ord)
    same_everywhere(norm)
    close(norm.double(), alone.double(), ord, torch.float32)
    if isinstance(ord, int) or ord == math.inf:
        check_bound([p.grad for _, p in kept if p.grad is not None], max_norm, ord)
    if full:
        _, clipped = on_one_process(full, max_norm, ord)
        for (_, p), y in zip(kept, clipped, strict=True):
            if isinstance(p.grad, DTensor):
                y = distribute_tensor(y, p.grad.device_mesh, p.grad.placements, src_data_rank=None).to_local()
                close(p.grad.to_local(), y, 3)
            elif p.grad is not None:
                close(p.grad, y, 3)


if __name__ == "__main__":
    run_all(globals())
