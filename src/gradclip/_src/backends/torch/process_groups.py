"""Process groups: those that users pass, with checks for mistakes in them, and communication within them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradclip._src.words import listed, typed

ROOM = 16
"""How many values a first reduction holds besides its marks: four flags, and two norms of order 2 or one of order 3."""

ROOM_FOR_EACH = 4096
"""The same for reductions of many norms: 680 norms of order 2."""


@dataclass(frozen=True)
class Group:
    """More than one process, reducing together. Groups with the same ranks are equal."""

    ranks: tuple[int, ...]
    handle: Any

    def __eq__(self, other: object) -> bool:
        # Different meshes have different handles for the same ranks, but one reduction over these ranks is enough.
        return isinstance(other, Group) and self.ranks == other.ranks

    def __hash__(self) -> int:
        return hash(self.ranks)


def groups(named: Sequence[Any]) -> tuple[Group, ...]:
    """Return the groups of several processes among process groups and all dimensions of meshes.

    Groups that `check_named` refuses are left out, so that the error can still be sent to the processes of the others.
    """
    handles = [handle for one in named if _mistake(one) is None for handle in _handles(one)]
    found = [Group(tuple(dist.get_process_group_ranks(handle)), handle) for handle in handles]
    # A single process has no one to reduce with.
    return tuple(group for group in found if len(group.ranks) > 1)


def _handles(one: object) -> Sequence[Any]:
    return one.get_all_groups() if isinstance(one, dist.DeviceMesh) else [one]


def check_known(named: Sequence[Any]) -> None:
    """Raise like `check_named` if this process has no other processes to notify first."""
    if not dist.is_initialized():
        check_named(named)


def check_named(named: Sequence[Any]) -> None:
    """Raise a TypeError for anything but a process group or mesh, and a ValueError if this process is not in it."""
    for mistake in filter(None, map(_mistake, named)):
        raise mistake


def _mistake(one: object) -> Exception | None:
    """Return the error for a wrong process group or mesh, or None."""
    if isinstance(one, dist.DeviceMesh):
        return None if takes_part(one) else _not_a_member(f"a mesh of the ranks {listed(one.mesh.flatten().tolist())}")
    # `dist.new_group` returns this number to processes outside the group.
    if isinstance(one, int) and one == dist.GroupMember.NON_GROUP_MEMBER:
        return _not_a_member("GroupMember.NON_GROUP_MEMBER, which means a group of other processes")
    if not isinstance(one, dist.ProcessGroup):
        return TypeError(
            "process_group and mesh take process groups and meshes of torch.distributed, or a list of them, got "
            f"{typed(one)}. Pass the result of dist.new_group or init_device_mesh. For "
            "the name of a dimension, such as 'dp', pass mesh.get_group('dp')."
        )
    try:
        ranks = dist.get_process_group_ranks(one)
    except KeyError:
        return ValueError(
            "torch.distributed does not know this process_group: it has been destroyed. Pass a group that still exists."
        )
    return None if dist.get_rank() in ranks else _not_a_member(f"a group of the ranks {listed(ranks)}")


def _not_a_member(named: str) -> ValueError:
    return ValueError(
        f"process_group or mesh is {named}: this process, rank {dist.get_rank()}, is not in it. Pass a group that "
        "contains this process, or None."
    )


def takes_part(mesh: dist.DeviceMesh) -> bool:
    """Say whether this process is in a mesh."""
    return mesh.get_coordinate() is not None


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank()


def reduce(
    values: Sequence[Any],
    group: Group,
    device: torch.device,
    marks: Sequence[float],
    *,
    largest: bool,
    room: int = ROOM,
) -> tuple[Any, Any]:
    """Return the sums (or maxima) of the values of all members of a group, and which marks all members share.

    The values are wide scalars, or vectors of them, equally many on each member; the sums are one vector. Values and
    marks are reduced as one vector of fixed length, with `room` for so many values, so that a member with more values
    or other marks is noticed. Values that do not fit follow in a second vector. In host memory, it is sent only if the
    first two marks show that all members have equally many values.
    """
    on_host = not any(isinstance(value, torch.Tensor) for value in values)
    total = partial(_total, group=group, device=device, largest=largest)
    tail = slice(-len(marks), None)
    with torch.no_grad():
        own = _joined(values, on_host)
        first, rest = own[:room], own[room:]
        beside = own.new_zeros(room - len(first) + len(marks))
        for place, mark in enumerate(marks, room - len(first)):
            if mark:
                beside[place].fill_(mark)  # on the device: a copy from the host would wait
        # One vector, because a small reduction costs as much as its message.
        reduced = total(torch.cat([first, beside]))
        # Marks are integers, so sums are exact. Only if all members have the same mark is the sum n times this
        # process's mark.
        same = reduced[tail] == beside[tail] * (1 if largest else len(group.ranks))
        found = reduced[: len(first)]
        if len(rest):
            # Reducing vectors of different lengths would fail or hang. On a device the marks are not read, because that
            # would wait.
            found = torch.cat([found, rest if on_host and not all(same[:2]) else total(rest)])
    return (found.numpy(), same.numpy()) if on_host else (found, same)


def _joined(values: Sequence[Any], on_host: bool) -> torch.Tensor:
    """Return scalars and vectors as one vector."""
    if on_host:
        return torch.from_numpy(np.concatenate([np.ravel(value) for value in values]).astype(np.float64))
    if not any(value.ndim for value in values):
        return torch.stack(list(values))
    return torch.cat([value.reshape(-1) for value in values])


def cut(vector: Any, lengths: Sequence[int]) -> Sequence[Any]:
    """Return consecutive parts of a vector, as long as given."""
    if isinstance(vector, torch.Tensor):
        return vector.split(list(lengths))
    return np.split(vector, np.cumsum(lengths)[:-1])


def _total(vector: torch.Tensor, group: Group, device: torch.device, largest: bool) -> torch.Tensor:
    """Return the sum or maximum of all members' vectors, on the device of the own vector, which may change."""
    # The group may support only its own devices, as NCCL does.
    reduced = vector.to(device)
    try:
        dist.all_reduce(reduced, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group.handle)
    except RuntimeError as error:
        raise RuntimeError(
            f"the norm could not be reduced over the ranks {listed(group.ranks)}: one of them has "
            "ended, did not make the call, or lists its groups in a different order. No gradient has been changed "
            "here. "
            f"{error}"
        ) from error
    return reduced.to(vector.device)


def add_up(values: Sequence[Any], group: Group, *_: object) -> list[Any]:
    """Return the sums of what all members of a group pass. Each passes equally many numbers of any type."""
    return [sum(of_all) for of_all in zip(*gathered(values, group), strict=True)]


def exchange(messages: Sequence[Any], groups: Sequence[Group]) -> list[Any]:
    """Return the messages (all texts or all tuples) of all processes that can be reached through the groups."""
    known = list(messages)
    for group in groups:
        known = sorted(set(chain.from_iterable(gathered(known, group))))
    return known


def gathered(sent: object, group: Group) -> list[Any]:
    """Return what each member of a group sends."""
    received: list[Any] = [None] * len(group.ranks)
    dist.all_gather_object(received, sent, group=group.handle)
    return received
