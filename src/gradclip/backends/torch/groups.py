"""The process groups and meshes that users pass, and checks for mistakes in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from gradclip.wording import listed


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
            f"{one!r:.80} of type {type(one).__name__}. Pass the result of dist.new_group or init_device_mesh. For "
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
