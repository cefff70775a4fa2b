"""PyTorch tensors that several processes hold: the part of this process, and reductions over process groups.

A distributed tensor says for each dimension of its mesh of processes how it lies there. `Shard`: the processes hold
different elements, so a norm has to be added up over them. `Replicate`: they hold the same, which must count once.
`Partial`: they hold terms of a sum, which has to be formed before there is a norm.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate


@dataclass(frozen=True)
class Group:
    """Processes that reduce something together, more than one. Those of the same ranks are the same."""

    ranks: tuple[int, ...]
    handle: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and self.ranks == other.ranks

    def __hash__(self) -> int:
        return hash(self.ranks)


@dataclass(frozen=True)
class TorchParts:
    """What this process has of each gradient, and the tensors that stand in `.grad` with it.

    These are others than before where those of before hold the terms of a sum.
    """

    locals: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]

    def chosen(self, indices: Sequence[int]) -> "TorchParts":
        """Return those of the gradients at `indices`."""
        return TorchParts([self.locals[i] for i in indices], [self.tensors[i] for i in indices])

    def whole(self, updated: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return what stands in `.grad` when this process's parts are `updated`."""
        if updated is self.locals:
            return self.tensors
        every = zip(updated, self.locals, self.tensors, strict=True)
        return [tensor if new is local else _around(new, tensor) for new, local, tensor in every]


def _around(local: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is laid out as another, of which this process has `local`."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def parts(gradients: Sequence[Any], holders: Sequence[Any]) -> TorchParts:
    """Return what this process has of each gradient, of one that is no distributed tensor all.

    Terms of a sum are added up over their mesh, one gradient after the other.
    """
    tensors = gradients
    with torch.no_grad():
        if _any_partial(gradients):
            tensors = [summed(gradient, holder) for gradient, holder in zip(gradients, holders, strict=True)]
        found = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    if AsyncCollectiveTensor in set(map(type, found)):
        found = [x.wait() if isinstance(x, AsyncCollectiveTensor) else x for x in found]
    return TorchParts(found, tensors)


def summed(tensor: Any, holder: Any = None) -> Any:
    """Return a tensor, with the sum in it where it holds the terms of one (or candidates for the largest)."""
    return tensor.redistribute(placements=_settled(tensor, holder)) if _any_partial([tensor]) else tensor


def _settled(gradient: DTensor, holder: Any) -> Sequence[Any]:
    """Return how the sum lies of which a gradient holds terms: as its parameter, where that can be."""
    beside = isinstance(holder, DTensor) and holder.device_mesh == gradient.device_mesh
    if beside and not _any_partial([holder]):
        return holder.placements
    return [Replicate() if placement.is_partial() else placement for placement in gradient.placements]


def _any_partial(tensors: Sequence[Any]) -> bool:
    placements = [x.placements for x in tensors if isinstance(x, DTensor)]
    return any(issubclass(kind, Partial) for kind in set(map(type, chain.from_iterable(placements))))


def layouts(tensors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return for each tensor a key of what `split_over` looks at, so that it is looked at once for many tensors.

    What is split follows from the mesh and the kinds of the placements.
    """
    meshes = [x.device_mesh if isinstance(x, DTensor) else None for x in tensors]
    placements = [x.placements if isinstance(x, DTensor) else () for x in tensors]
    return list(zip(_numbered(meshes), _kinds(placements), strict=True))


def _numbered(meshes: Sequence[Any]) -> Iterable[int]:
    """Return a number for each mesh. FSDP2 beside tensor parallelism has one for each parameter, all of them equal."""
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


def split_over(parameter: Any, gradient: Any, named: tuple[Group, ...]) -> list[tuple[Group, ...]]:
    """Return the groups over which a parameter is split, and those of its gradient, which may be others.

    The groups that are named count unless they lie within the mesh of a distributed tensor, which says it all.
    """
    found = []
    for tensor in (parameter, gradient):
        if isinstance(tensor, DTensor):
            partial = tensor is gradient and _any_partial([tensor])
            found.append(
                _split_over(tensor.device_mesh, _settled(gradient, parameter) if partial else tensor.placements, named)
            )
    return found or [named]


def _split_over(mesh: Any, placements: Sequence[Any], named: Sequence[Group]) -> tuple[Group, ...]:
    split = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    handles = [mesh.get_group(dim) for dim in split] if _takes_part(mesh) else []
    covered = set(mesh.mesh.flatten().tolist()) if named else set()
    return groups(handles) + tuple(group for group in named if not covered.issuperset(group.ranks))


def _takes_part(mesh: Any) -> bool:
    return mesh.get_coordinate() is not None


def groups(named: Sequence[Any]) -> tuple[Group, ...]:
    """Return the groups of several processes among process groups and all dimensions of meshes."""
    found: list[Any] = []
    for one in named:
        if isinstance(one, dist.DeviceMesh):
            found += one.get_all_groups() if _takes_part(one) else []
        elif one != dist.GroupMember.NON_GROUP_MEMBER:
            found.append(one)
    listed = [Group(tuple(dist.get_process_group_ranks(handle)), handle) for handle in found]
    return tuple(group for group in listed if len(group.ranks) > 1)


def device_for(handles: Sequence[Group], holders: Sequence[Any]) -> torch.device:
    """Return the device on which this process reduces: that of its parameters where all groups can."""
    types = [device.type for device in handles[0].handle._device_types] if handles else []
    accelerator = torch.accelerator.current_accelerator()
    first = next((holder for holder in holders if isinstance(holder, torch.Tensor)), None)
    known = [] if first is None else [first.device.type]
    wanted = [*known, *([accelerator.type] if accelerator else []), "cpu"]
    return torch.device(next((name for name in wanted if name in types), wanted[0]))


def nothing(device: torch.device) -> torch.Tensor:
    """Return a tensor without elements, for a process that holds no gradient."""
    return torch.empty(0, dtype=torch.float32, device=device)


def reduce(values: Sequence[Any], group: Group, device: torch.device, *, largest: bool) -> list[Any]:
    """Return the sums, or the largest, of what all members of a group pass: as many wide scalars each."""
    on_host = not any(isinstance(value, torch.Tensor) for value in values)
    vector = torch.from_numpy(np.array(values, np.float64)) if on_host else torch.stack(list(values))
    with torch.no_grad():
        reduced = vector.to(device)
        try:
            dist.all_reduce(reduced, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group.handle)
        except RuntimeError as error:
            raise RuntimeError(
                f"the norm could not be reduced over the ranks {', '.join(map(str, group.ranks))}: one of them has "
                f"ended, or did not call. No gradient has been changed here. {error}"
            ) from error
    return list(reduced.cpu().numpy()) if on_host else list(reduced.to(vector.device).unbind())


def rank() -> int:
    """Return the number of this process among all."""
    return dist.get_rank()


def add_up(values: Sequence[Any], group: Group) -> list[Any]:
    """Return the sums of what all members of a group pass: as many numbers of any kind each."""
    return [sum(of_all) for of_all in zip(*_gathered(values, group), strict=True)]


def exchange(messages: Sequence[str], groups: Sequence[Group]) -> list[str]:
    """Return the messages of all processes that are reached through the groups, one after the other."""
    known = list(messages)
    for group in groups:
        known = sorted(set(chain.from_iterable(_gathered(known, group))))
    return known


def _gathered(sent: Any, group: Group) -> list[Any]:
    """Return what all members of a group send."""
    received: list[Any] = [None] * len(group.ranks)
    dist.all_gather_object(received, sent, group=group.handle)
    return received
