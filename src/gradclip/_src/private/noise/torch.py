"""Exact noise for PyTorch: in compiled programs, and for distributed tensors.

Programs of `torch.compile` call an operator that they do not look into. Each part of a distributed tensor is drawn
once, by the first process that holds it, and sent to the others.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from gradclip._src.private.noise.exact import AskedNoise, ExactNoise
from gradclip._src.words import typed

_NAME = "gradclip::exact_noise"
# The tag: two calls on one sum are two draws, and none is computed again for a backward pass. In older releases
# `custom_op` takes no tags.
torch.library.define(
    _NAME,
    "(Tensor[] leaves, str source, float multiplier, float total, float? in_steps) -> Tensor[]",
    tags=(torch.Tag.nondeterministic_seeded,),
)


@torch.library.impl(_NAME, "CompositeExplicitAutograd")
def _drawn(
    leaves: Sequence[torch.Tensor], source: str, multiplier: float, total: float, in_steps: float | None
) -> list[torch.Tensor]:
    """Return tensors plus noise."""
    return AskedNoise(source, multiplier, total, in_steps).of(leaves).added(leaves)


@torch.library.register_fake(_NAME)
def _like(leaves: Sequence[torch.Tensor], *asked: object) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x in leaves]


def called_back(leaves: Sequence[torch.Tensor], asked: AskedNoise) -> list[torch.Tensor]:
    """Return traced tensors plus noise."""
    return torch.ops.gradclip.exact_noise([x.detach() for x in leaves], *asked)


def noise_on_parts(leaves: Sequence[Any], noise: ExactNoise) -> list[DTensor]:
    """Return distributed tensors plus noise. Raise ValueError, on every process alike, for others among them."""
    for leaf in leaves:
        _check(leaf)
    own = [place for place, leaf in enumerate(leaves) if _draws(leaf)]
    drawn = dict(zip(own, noise.added([leaves[place].to_local().detach() for place in own]), strict=True))
    return [_sent(leaf, drawn.get(place)) for place, leaf in enumerate(leaves)]


def _check(leaf: object) -> None:
    if not isinstance(leaf, DTensor):
        raise ValueError(
            f"the sum has distributed tensors, and beside them {typed(leaf)}, of which every process may hold a copy. "
            "Distribute it over the same mesh, as Replicate() for instance."
        )
    if any(isinstance(placement, Partial) for placement in leaf.placements):
        raise ValueError(
            f"the sum is not added up yet, its placements are {leaf.placements}. Call .redistribute() on it, with "
            "Shard or Replicate in place of Partial."
        )
    mesh, processes = leaf.device_mesh, dist.get_world_size()
    if mesh.size() != processes:
        raise ValueError(
            f"the sum is on a mesh of {mesh.size()} of {processes} processes, and the others may hold it as well. Use "
            "a mesh of all processes, with Replicate() where they hold the same."
        )


def _draws(leaf: DTensor) -> bool:
    """Say whether this process is the first of those that hold the same part."""
    coordinate = leaf.device_mesh.get_coordinate() or ()
    return all(
        not at for at, placement in zip(coordinate, leaf.placements, strict=True) if isinstance(placement, Replicate)
    )


def _sent(leaf: DTensor, part: torch.Tensor | None) -> DTensor:
    """Return the distributed tensor of parts, each sent to all who hold it, along one dimension after the other."""
    mesh, here = leaf.device_mesh, leaf.to_local()
    part = here.new_empty(here.shape) if part is None else part
    for dimension, placement in enumerate(leaf.placements):
        if isinstance(placement, Replicate):
            group = mesh.get_group(dimension)
            dist.broadcast(part, dist.get_global_rank(group, 0), group)
    whole = torch.empty(leaf.shape, device="meta")
    return DTensor.from_local(part, mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=whole.stride())
