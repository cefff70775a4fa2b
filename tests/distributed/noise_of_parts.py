"""Exact noise for sums whose parts lie on four processes: right, drawn once, and the same for all who hold a part."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import gradclip
from gradclip._src.private.noise import discrete
from gradients import laid_out, numbers, same_everywhere
from meshes import line, mesh
from worker import run_all

FLOATS = gradclip.clipped_sum_sensitivity(1.0, batch_size=8)
ON_GRID = gradclip.clipped_sum_sensitivity(1.0, batch_size=8, grid=2**20)
PLACEMENTS = [
    (first, second) for first in (Shard(0), Shard(1), Replicate()) for second in (Shard(0), Shard(1), Replicate())
]


def noised(tree, sensitivity=FLOATS, rng="system"):
    return gradclip.add_noise(tree, sensitivity, noise_multiplier=1.0, rng=rng)


def replaced(sampler):
    """Return a context in which this sampler stands for all."""
    patch = pytest.MonkeyPatch()
    patch.setattr(discrete, "sampler", sampler)
    return patch


def each_part_is_rounded_as_the_whole_sum_is():
    full = [numbers(7, 5, seed=seed) for seed in range(len(PLACEMENTS))]
    patch, scales = replaced(lambda source, scale: scales.append(scale) or (lambda piece: piece + 1)), []
    expected = noised(full)
    found = noised([distribute_tensor(x, mesh(), pair) for x, pair in zip(full, PLACEMENTS, strict=True)])
    patch.undo()
    assert len(set(scales)) == 1
    for x, y, pair in zip(found, expected, PLACEMENTS, strict=True):
        assert x.placements == pair
        assert x.device_mesh == mesh()
        assert torch.equal(x.full_tensor(), y)


def parts_of_what_is_split_twice_stay_in_place():
    # As fully_shard leaves a parameter that tensor parallelism has split.
    full, (data, model) = numbers(8, 3), mesh().get_coordinate()
    own, laid = full.chunk(2)[model].chunk(2)[data].clone(), [_StridedShard(0, split_factor=2), Shard(0)]
    patch = replaced(lambda source, scale: lambda piece: piece + 1)
    expected = noised(full).chunk(2)[model].chunk(2)[data]
    found = noised(DTensor.from_local(own, mesh(), laid, run_check=False, shape=full.shape, stride=full.stride()))
    patch.undo()
    assert torch.equal(found.to_local(), expected)


def all_who_hold_a_part_hold_the_same_noise():
    zeros = [distribute_tensor(torch.zeros(4, 6), mesh(), pair) for pair in PLACEMENTS]
    once, again = ([x.full_tensor() for x in noised(zeros)] for _ in range(2))
    for x, y in zip(once, again, strict=True):
        same_everywhere(x)
        assert not torch.equal(x, y)
        assert x.unique().numel() == x.numel()  # no part has the noise of another
    both = distribute_tensor(torch.zeros(3), line(), [Replicate()])
    same_everywhere(noised(both).to_local())


def each_part_is_drawn_by_one_process():
    drawn = []
    patch = replaced(lambda source, scale: lambda piece: drawn.append(piece.size) or piece)
    noised([distribute_tensor(torch.zeros(4, 4), mesh(), pair) for pair in PLACEMENTS])
    patch.undo()
    total = torch.tensor(sum(drawn))
    dist.all_reduce(total)
    assert total == 16 * len(PLACEMENTS)


def integers_of_a_grid_get_noise_of_the_right_size():
    zeros = distribute_tensor(torch.zeros(200, 100, dtype=torch.int64), line(), [Shard(0)])
    found = noised(zeros, ON_GRID).full_tensor()
    assert found.dtype == torch.int64
    wide = found.double()
    # The variance has a standard deviation of sqrt(2 / n) of it: six of these.
    assert abs(wide.var() / 2.0**40 - 1) < 6 * np.sqrt(2 / wide.numel())


def what_has_no_one_meaning_is_refused():
    x = numbers(4, 4)
    split = distribute_tensor(x, line(), [Shard(0)])
    for tree, text in (
        ([split, x], r"has distributed tensors, and beside them an array of type Tensor"),
        ([laid_out(x, line(), [Partial()])], r"not added up yet, .* Call .redistribute\(\)"),
        ([distribute_tensor(x, mesh()["tp"], [Shard(0)])], "on a mesh of 2 of 4 processes, and the others may hold it"),
    ):
        with pytest.raises(ValueError, match=text):
            noised(tree)
    with pytest.raises(ValueError, match=r"noise is exact: pass rng='system'. Each process has its own"):
        noised(split, rng=torch.Generator().manual_seed(0))


if __name__ == "__main__":
    run_all(globals())
