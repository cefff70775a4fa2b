"""Process groups and meshes of PyTorch that a user names, and what can be wrong with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from gradclip.wording import listed


@dataclass(frozen=True)
class Group:
    """Processes that reduce something together, more than one. Those of the same ranks are the same."""

    ranks: tuple[int, ...]
    handle: Any

    def __eq__(self, other: object) -> bool:
        # Meshes have handles of their own for the same ranks. One reduction over them is enough.
        return isinstance(other, Group) and self.ranks == other.ranks

    def __hash__(self) -> int:
        return hash(self.ranks)


def groups(named: Sequence[Any]) -> tuple[Group, ...]:
    """Return the groups of several processes among process groups and all dimensions of meshes.

    What `check_named` refuses is left out, so that a mistake in one can be told to the processes of the others.
    """
    handles = [handle for one in named if _mistake(one) is None for handle in _handles(one)]
    found = [Group(tuple(dist.get_process_group_ranks(handle)), handle) for handle in handles]
    # A process alone has nobody to reduce with.
    return tuple(group for group in found if len(group.ranks) > 1)


def _handles(one: object) -> Sequence[Any]:
    return one.get_all_groups() if isinstance(one, dist.DeviceMesh) else [one]


def check_known(named: Sequence[Any]) -> None:
    """Raise as `check_named` does where this process knows of no others, which would have to be told."""
    if not dist.is_initialized():
        check_named(named)


def check_named(named: Sequence[Any]) -> None:
    """Raise a TypeError for what is no process group or mesh, a ValueError for one that this process is not in."""
    for mistake in filter(None, map(_mistake, named)):
        raise mistake


def _mistake(one: object) -> Exception | None:
    """Return what is wrong with a process group or mesh that is named."""
    if isinstance(one, dist.DeviceMesh):
        return None if takes_part(one) else _not_a_member(f"a mesh of the ranks {listed(one.mesh.flatten().tolist())}")
    # `dist.new_group` returns this number to processes outside of the group.
    if isinstance(one, int) and one == dist.GroupMember.NON_GROUP_MEMBER:
        return _not_a_member("GroupMember.NON_GROUP_MEMBER, which stands for a group of others")
    if not isinstance(one, dist.ProcessGroup):
        return TypeError(
            "process_group and mesh take process groups and meshes of torch.distributed, or a list of them, got "
            f"{one!r:.80} of type {type(one).__name__}. Pass what dist.new_group or init_device_mesh returned, such as "
            "mesh.get_group('dp') for a name of a dimension."
        )
    try:
        ranks = dist.get_process_group_ranks(one)
    except KeyError:
        return ValueError("process_group is a group that torch.distributed does not know: it has been destroyed.")
    return None if dist.get_rank() in ranks else _not_a_member(f"a group of the ranks {listed(ranks)}")


def _not_a_member(named: str) -> ValueError:
    return ValueError(
        f"process_group or mesh is {named}: this process, rank {dist.get_rank()}, is not in it, and holds no part of "
        "what it holds. Name a group that this process is in, or None."
    )


def takes_part(mesh: dist.DeviceMesh) -> bool:
    """Say whether this process is in a mesh."""
    return mesh.get_coordinate() is not None
