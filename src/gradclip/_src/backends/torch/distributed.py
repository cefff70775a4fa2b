"""PyTorch's distributed tensors: this process's shard, and the groups over which they are sharded.

A distributed tensor has a placement for each dimension of its mesh. `Shard`: processes hold different elements, so
their norms must be combined. `Replicate`: processes hold the same elements, which must count once. `Partial`: processes
hold terms of a sum, which must be computed before there is a norm.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from gradclip._src.backends.torch.process_groups import Group, groups, takes_part


@dataclass(frozen=True)
class TorchShards:
    """This process's shard of each gradient, and the tensors in `.grad` that contain the shards.

    A tensor with terms of a sum (`Partial`) is replaced by one with the sum.
    """

    locals: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]

    def chosen(self, indices: Sequence[int]) -> "TorchShards":
        """Return the shards of the gradients at `indices`."""
        return TorchShards([self.locals[i] for i in indices], [self.tensors[i] for i in indices])

    def whole(self, updated: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the new value of each `.grad` when this process's shards become `updated`."""
        if updated is self.locals:
            return self.tensors
        every = zip(updated, self.locals, self.tensors, strict=True)
        return [tensor if new is local else _around(new, tensor) for new, local, tensor in every]


def _around(local: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor laid out like `tensor`, with `local` as this process's shard."""
    if not isinstance(tensor, DTensor):
        return local
    # Without shape and stride, PyTorch assumes that all shards have the same size. `run_check` would communicate.
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def shards_of(gradients: Sequence[Any], parameters: Sequence[Any]) -> TorchShards:
    """Return this process's shard of each gradient, or all of it if it is not a distributed tensor.

    Partial sums are added over their mesh, one gradient at a time.
    """
    tensors = gradients
    with torch.no_grad():
        if _any_partial(gradients):
            tensors = [summed(gradient, parameter) for gradient, parameter in zip(gradients, parameters, strict=True)]
        found = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    # The result of a collective that may still be running. Its values are valid only after `wait`.
    if AsyncCollectiveTensor in set(map(type, found)):
        found = [x.wait() if isinstance(x, AsyncCollectiveTensor) else x for x in found]
    return TorchShards(found, tensors)


def shards_like(tensors: Sequence[Any], others: Sequence[Any]) -> Sequence[torch.Tensor]:
    """Return this process's part of each tensor, laid out like the other tensor beside it if that is distributed."""
    with torch.no_grad():
        laid = [_laid_like(tensor, other) for tensor, other in zip(tensors, others, strict=True)]
    return shards_of(laid, others).locals


def _laid_like(tensor: Any, other: Any) -> Any:
    if not (isinstance(tensor, DTensor) and isinstance(other, DTensor)) or tensor.device_mesh != other.device_mesh:
        return tensor
    placements = _settled(other, tensor) if _any_partial([other]) else other.placements
    return tensor if tensor.placements == placements else tensor.redistribute(placements=placements)


def norms_like(norms: torch.Tensor, tensor: torch.Tensor, own: Sequence[int]) -> torch.Tensor:
    """Return the norms of units along the axes `own`, as a distributed tensor if processes have different units."""
    if not isinstance(tensor, DTensor):
        return norms
    placements = [_of_norms(placement, own) for placement in tensor.placements]
    if all(placement.is_replicate() for placement in placements):
        return norms
    shape = torch.Size(tensor.shape[axis] for axis in own)
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return DTensor.from_local(norms, tensor.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _of_norms(placement: Any, own: Sequence[int]) -> Any:
    dim = getattr(placement, "dim", None)
    if dim not in own:
        return Replicate()
    if isinstance(placement, _StridedShard):
        return _StridedShard(own.index(dim), split_factor=placement.split_factor)
    return Shard(own.index(dim))


def summed(tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> Any:
    """Return the tensor with its sum (or maximum) computed if it holds partial results, else unchanged."""
    return tensor.redistribute(placements=_settled(tensor, parameter)) if _any_partial([tensor]) else tensor


def _settled(gradient: DTensor, parameter: torch.Tensor | None) -> Sequence[Any]:
    """Return the placements for the sum of a partial gradient: those of its parameter if possible."""
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
    """Return a key for each tensor with everything that `sharded_over` depends on, to call it once per key.

    The sharding depends only on the mesh and the types of the placements.
    """
    meshes = [x.device_mesh if isinstance(x, DTensor) else None for x in tensors]
    placements = [x.placements if isinstance(x, DTensor) else () for x in tensors]
    return list(zip(_numbered(meshes), (tuple(map(type, of_one)) for of_one in placements), strict=True))


def layouts_with_axes(tensors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the same with the placements themselves, which name the axes that are split."""
    placements = [x.placements if isinstance(x, DTensor) else () for x in tensors]
    return [(mesh, *each) for (mesh, _), each in zip(layouts(tensors), placements, strict=True)]


def _numbered(meshes: Sequence[Any]) -> Iterable[int]:
    """Return a number for each mesh. FSDP2 with tensor parallelism has a separate but equal mesh for each parameter."""
    # Hashing a mesh takes long, so each object is hashed once and then found by its id.
    different = dict(zip(map(id, meshes), meshes, strict=True))
    first: dict[Any, int] = {}
    number_of = {key: first.setdefault(mesh, key) for key, mesh in different.items()}
    return map(number_of.__getitem__, map(id, meshes))


def sharded_over(
    parameter: torch.Tensor, gradient: torch.Tensor | None, named: tuple[Group, ...], own: Sequence[int] = ()
) -> list[tuple[Group, ...]]:
    """Return the groups over which a parameter is sharded, and those over which its gradient is.

    Named groups count too, except groups within a distributed tensor's mesh, which already covers them. A shard along
    one of the axes `own` has all elements of its units, so it does not count.
    """
    found = []
    for tensor in (parameter, gradient):
        if isinstance(tensor, DTensor):
            partial = tensor is gradient and _any_partial([tensor])
            placements = _settled(gradient, parameter) if partial else tensor.placements
            found.append(_sharded_over(tensor.device_mesh, placements, named, own))
    return found or [named]


def _sharded_over(
    mesh: DeviceMesh, placements: Sequence[Any], named: Sequence[Group], own: Sequence[int]
) -> tuple[Group, ...]:
    split = [not (placement.is_replicate() or getattr(placement, "dim", None) in own) for placement in placements]
    sharded = [dim for dim, one in enumerate(split) if one]
    handles = [mesh.get_group(dim) for dim in sharded] if takes_part(mesh) else []
    covered = set(mesh.mesh.flatten().tolist()) if named else set()
    return groups(handles) + tuple(group for group in named if not covered.issuperset(group.ranks))


def fsdp1_shard(parameters: Sequence[Any]) -> int | None:
    """Return the index of the first parameter that is a shard of FullyShardedDataParallel (FSDP1), or None.

    FSDP1 marks its parameters, and its shards are flat. If any marked parameter is not flat, as with NO_SHARD, all are
    whole.
    """
    if all(issubclass(kind, DTensor) for kind in set(map(type, parameters))):
        return None
    # FSDP1 has no public way to recognize such parameters.
    marked = [i for i, p in enumerate(parameters) if "_fsdp_flattened" in getattr(p, "__dict__", ())]
    flat = all(parameters[i].dim() == 1 and not _is_whole(parameters[i]) for i in marked)
    return marked[0] if marked and flat else None


def _is_whole(flat: torch.Tensor) -> bool:
    """Say whether an FSDP1 flat parameter, which combines several parameters, is unsharded."""
    whole = getattr(flat, "_unpadded_unsharded_size", None)
    return whole is not None and bool(flat.shape == whole)


def device_for(handles: Sequence[Group], parameters: Sequence[Any]) -> torch.device:
    """Return the device for this process's reductions: that of its parameters if the groups support it, else theirs."""
    # A group reduces only on the devices of its backends. NCCL, for example, does not reduce on the CPU.
    types = [device.type for device in handles[0].handle._device_types] if handles else []
    # A build of PyTorch for CUDA names its accelerator on machines that have none, too.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    first = next((p for p in parameters if isinstance(p, torch.Tensor)), None)
    known = [] if first is None else [first.device.type]
    wanted = [*known, *([accelerator.type] if accelerator else []), "cpu"]
    return torch.device(next((name for name in wanted if name in types), types[0] if types else wanted[0]))


def nothing(device: torch.device) -> torch.Tensor:
    """Return a tensor without elements, for a process that has no gradient."""
    return torch.empty(0, dtype=torch.float32, device=device)


def nothing_like(parameter: Any, shape: Callable[[Any], Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return a tensor without elements in the place of a gradient, for a process that lacks this one."""
    if not isinstance(parameter, torch.Tensor):
        return nothing(device)
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return own.detach().new_empty(tuple(shape(own)))
