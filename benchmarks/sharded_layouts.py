"""Gradients of ones and twos, laid out over four processes as in real training."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

WORLD = 4


class Meshes:
    """Meshes of four processes: one dimension, and 2 x 2."""

    def __init__(self):
        self.line = init_device_mesh("cpu", (WORLD,))
        self.square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameter(x, mesh=None, *placements):
    """Return a parameter with the gradient `x`, either whole on each process or sharded over a mesh."""
    settled = [Replicate() if placement.is_partial() else placement for placement in placements]
    whole = x if mesh is None else distribute_tensor(x, mesh, settled)
    p = torch.nn.Parameter(torch.zeros_like(whole))
    p.grad = whole
    if any(placement.is_partial() for placement in placements):
        p = torch.nn.Parameter(distribute_tensor(torch.zeros_like(x), mesh, [Shard(0)]))
        term = whole.to_local() / WORLD
        p.grad = DTensor.from_local(term, mesh, placements, run_check=False)
    return p


def one_mesh(meshes):
    full = [numbers(8, 4), numbers(6, seed=1)]
    return [parameter(x, meshes.line, Shard(0)) for x in full], full, {}


def two_dimensions(meshes):
    full = [numbers(8, 4), numbers(6, 4, seed=1)]
    return [parameter(x, meshes.square, Shard(0), Shard(1)) for x in full], full, {}


def hybrid(meshes):
    full = [numbers(8, 4), numbers(6, 4, seed=1)]
    return [parameter(x, meshes.square, Replicate(), Shard(0)) for x in full], full, {}


def strided(meshes):
    full = numbers(8, 4)
    dp, tp = meshes.square.get_coordinate()
    local = full.chunk(2)[tp].chunk(2)[dp].clone()
    laid = [_StridedShard(0, split_factor=2), Shard(0)]
    p = torch.nn.Parameter(DTensor.from_local(torch.zeros_like(local), meshes.square, laid, run_check=False))
    p.grad = DTensor.from_local(local, meshes.square, laid, run_check=False)
    return [p], [full], {}


def empty_shards(meshes):
    full = [numbers(8, 4), numbers(1, 4, seed=1)]
    return [parameter(x, meshes.line, Shard(0)) for x in full], full, {}


def empty_shards_largest(meshes):
    return *empty_shards(meshes)[:2], {"ord": float("inf")}


def empty_shards_smallest(meshes):
    return *empty_shards(meshes)[:2], {"ord": float("-inf")}


def two_meshes(meshes):
    full = [numbers(8, 4), numbers(6, 4, seed=1)]
    return [parameter(full[0], meshes.line, Shard(0)), parameter(full[1], meshes.square["tp"], Shard(0))], full, {}


def with_plain_tensors(meshes):
    full = [numbers(8, 4), numbers(6, seed=1)]
    return [parameter(full[0], meshes.line, Shard(0)), parameter(full[1])], full, {}


def partial(meshes):
    full = [numbers(8, 4), numbers(6, 4, seed=1)]
    return [parameter(full[0], meshes.line, Shard(0)), parameter(full[1], meshes.line, Partial())], full, {}


def bfloat16(meshes):
    full = [torch.ones(4, dtype=torch.bfloat16) for _ in range(700)]
    return [parameter(x, meshes.line, Shard(0)) for x in full], full, {}


def large_numbers(meshes):
    full = [1e25 * numbers(8, 4)]
    return [parameter(x, meshes.line, Shard(0)) for x in full], full, {}


def stages(meshes):
    full = [numbers(4, seed=seed) for seed in range(WORLD)]
    return [parameter(full[dist.get_rank()])], full, {"process_group": dist.group.WORLD}


def experts(meshes):
    full = [numbers(2, 4), numbers(6, seed=1)]
    tp = meshes.square["tp"]
    mine = [parameter(full[0][tp.get_local_rank()]), parameter(full[1])]
    return [{"params": mine[:1], "mesh": tp}, {"params": mine[1:]}], full, {}


def nothing_on_one(meshes):
    full = [numbers(8, 4), numbers(8, seed=1)]
    parameters = [parameter(x, meshes.line, Shard(0)) for x in full]
    if dist.get_rank() == WORLD - 1:
        parameters[0].grad = parameters[1].grad = None
    return parameters, [x[:6] for x in full], {}


LAYOUTS = {
    "shards on one mesh": one_mesh,
    "shards on 2 x 2": two_dimensions,
    "replicated x sharded (HSDP)": hybrid,
    "strided shards (FSDP x TP)": strided,
    "a shard is empty": empty_shards,
    "a shard is empty, ord inf": empty_shards_largest,
    "a shard is empty, ord -inf": empty_shards_smallest,
    "shards on two meshes": two_meshes,
    "shards and plain tensors": with_plain_tensors,
    "shards and a partial gradient": partial,
    "700 bfloat16 tensors": bfloat16,
    "float32 numbers of 1e25": large_numbers,
    "pipeline: other layers on each": stages,
    "experts split over a pair": experts,
    "no gradients on one process": nothing_on_one,
}
UNEVEN = ("a shard is empty, ord inf", "a shard is empty, ord -inf", "no gradients on one process")
"""Layouts in which PyTorch may continue on one process while others wait."""
