"""PyTorch tensors that several processes hold: the shard of this process, and over which groups they are sharded.

A distributed tensor says for each dimension of its mesh of processes how it lies there. `Shard`: the processes hold
different elements, so a norm has to be added up over them. `Replicate`: they hold the same, which must count once.
`Partial`: they hold terms of a sum, which has to be formed before there is a norm.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from gradclip.backends.torch.groups import Group, groups, takes_part


@dataclass(frozen=True)
class TorchShards:
    """The shard of each gradient that this process has, and the tensors that stand in `.grad` around them.

    A tensor that held the terms of a sum (`Partial`) has been replaced by one that holds the sum.
    """

    locals: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]

    def chosen(self, indices: Sequence[int]) -> "TorchShards":
        """Return those of the gradients at `indices`."""
        return TorchShards([self.locals[i] for i in indices], [self.tensors[i] for i in indices])

    def whole(self, updated: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return what stands in `.grad` when this process's shards are `updated`."""
        if updated is self.locals:
            return self.tensors
        every = zip(updated, self.locals, self.tensors, strict=True)
        return [tensor if new is local else _around(new, tensor) for new, local, tensor in every]


def _around(local: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is laid out as another, of which this process has `local`."""
    if not isinstance(tensor, DTensor):
        return local
    # Without shape and stride PyTorch takes all shards to be of one size. `run_check` would send messages.
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def shards_of(gradients: Sequence[Any], parameters: Sequence[Any]) -> TorchShards:
    """Return what this process has of each gradient, of one that is no distributed tensor all.

    Terms of a sum are added up over their mesh, one gradient after the other.
    """
    tensors = gradients
    with torch.no_grad():
        if _any_partial(gradients):
            tensors = [summed(gradient, parameter) for gradient, parameter in zip(gradients, parameters, strict=True)]
        found = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    # A result of a collective that may still be under way; its values are there only after `wait`.
    if AsyncCollectiveTensor in set(map(type, found)):
        found = [x.wait() if isinstance(x, AsyncCollectiveTensor) else x for x in found]
    return TorchShards(found, tensors)


def summed(tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> Any:
    """Return a tensor, with the sum in it where it holds the terms of one (or candidates for the largest)."""
    return tensor.redistribute(placements=_settled(tensor, parameter)) if _any_partial([tensor]) else tensor


def _settled(gradient: DTensor, parameter: torch.Tensor | None) -> Sequence[Any]:
    """Return the placements for the sum of a gradient's terms: those of its parameter, where that can be."""
    if (
        isinstance(parameter, DTensor)
        and parameter.device_mesh == gradient.device_mesh
        and not _any_partial([parameter])
    ):
        return parameter.placements
    return [Replicate() if placement.is_partial() else placement for placement in gradient.placements]


def _any_partial(tensors: Sequence[Any]) -> bool:
    placements = [x.placements for x in tensors if isinstance(x, DTensor)]
    return any(issubclass(kind, Partial) for kind in set(map(type, chain.from_iterable(placements))))


def layouts(tensors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return for each tensor a key of what `sharded_over` looks at, so that it is looked at once for many tensors.

    What is sharded follows from the mesh and the kinds of the placements.
    """
    meshes = [x.device_mesh if isinstance(x, DTensor) else None for x in tensors]
    placements = [x.placements if isinstance(x, DTensor) else () for x in tensors]
    return list(zip(_numbered(meshes), _kinds(placements), strict=True))


def _numbered(meshes: Sequence[Any]) -> Iterable[int]:
    """Return a number for each mesh. FSDP2 beside tensor parallelism has one for each parameter, all of them equal."""
    # To hash a mesh takes long: each object is hashed once, and found by its id from then on.
    different = dict(zip(map(id, meshes), meshes, strict=True))
    first: dict[Any, int] = {}
    number_of = {key: first.setdefault(mesh, key) for key, mesh in different.items()}
    return map(number_of.__getitem__, map(id, meshes))


def _kinds(placements: Sequence[Sequence[Any]]) -> Iterable[tuple[type, ...]]:
    dimensions = set(map(len, placements))
    if len(dimensions) != 1 or dimensions == {0}:
        return (tuple(map(type, of_one)) for of_one in placements)
    every = map(type, chain.from_iterable(placements))
    return zip(*[every] * dimensions.pop(), strict=True)  # the same, without a call for each tensor


def sharded_over(
    parameter: torch.Tensor, gradient: torch.Tensor | None, named: tuple[Group, ...]
) -> list[tuple[Group, ...]]:
    """Return the groups over which a parameter is sharded, and those over which its gradient is.

    The groups that are named count unless they lie within the mesh of a distributed tensor, which says it all.
    """
    found = []
    for tensor in (parameter, gradient):
        if isinstance(tensor, DTensor):
            partial = tensor is gradient and _any_partial([tensor])
            placements = _settled(gradient, parameter) if partial else tensor.placements
            found.append(_sharded_over(tensor.device_mesh, placements, named))
    return found or [named]


def _sharded_over(mesh: DeviceMesh, placements: Sequence[Any], named: Sequence[Group]) -> tuple[Group, ...]:
    sharded = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    handles = [mesh.get_group(dim) for dim in sharded] if takes_part(mesh) else []
    covered = set(mesh.mesh.flatten().tolist()) if named else set()
    return groups(handles) + tuple(group for group in named if not covered.issuperset(group.ranks))


def fsdp1_shard(parameters: Sequence[Any]) -> int | None:
    """Return the index of the first parameter of which FullyShardedDataParallel (FSDP1) keeps a shard here, or None.

    FSDP1 marks its parameters, and their shards are flat. Where a marked one is not, as under NO_SHARD, they are whole.
    """
    if all(issubclass(kind, DTensor) for kind in set(map(type, parameters))):
        return None
    # FSDP1 has no public name for such parameters.
    marked = [i for i, p in enumerate(parameters) if "_fsdp_flattened" in getattr(p, "__dict__", ())]
    flat = all(parameters[i].dim() == 1 and not _is_whole(parameters[i]) for i in marked)
    return marked[0] if marked and flat else None


def _is_whole(flat: torch.Tensor) -> bool:
    """Say whether one of FSDP1's flat parameters, that stands for several, is all of it."""
    whole = getattr(flat, "_unpadded_unsharded_size", None)
    return whole is not None and bool(flat.shape == whole)


def device_for(handles: Sequence[Group], parameters: Sequence[Any]) -> torch.device:
    """Return the device on which this process reduces: that of its parameters where all groups can."""
    # A group reduces on the devices of its backends alone: one of NCCL does not reduce on the CPU.
    types = [device.type for device in handles[0].handle._device_types] if handles else []
    accelerator = torch.accelerator.current_accelerator()
    first = next((p for p in parameters if isinstance(p, torch.Tensor)), None)
    known = [] if first is None else [first.device.type]
    wanted = [*known, *([accelerator.type] if accelerator else []), "cpu"]
    return torch.device(next((name for name in wanted if name in types), wanted[0]))


def nothing(device: torch.device) -> torch.Tensor:
    """Return a tensor without elements, for a process that holds no gradient."""
    return torch.empty(0, dtype=torch.float32, device=device)
