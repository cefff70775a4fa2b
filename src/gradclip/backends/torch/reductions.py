"""Communication between processes: vectors reduced over a group, and arbitrary objects for errors."""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradclip.backends.torch.groups import Group
from gradclip.wording import listed

ROOM = 16
"""How many values a first reduction holds besides its marks: four flags, and two norms of order 2 or one of order 3."""


def reduce(
    values: Sequence[Any], group: Group, device: torch.device, marks: Sequence[float], *, largest: bool
) -> tuple[list[Any], Any]:
    """Return the sums (or maxima) of the values of all members of a group, and which marks all members share.

    The values are wide scalars, equally many on each member. The values and marks are reduced as one vector of fixed
    length, so that a member with more values or other marks is noticed. Values that do not fit follow in a second
    vector. In host memory, it is sent only if the first two marks show that all members have equally many values.
    """
    # One vector, because a small reduction costs as much as its message.
    on_host = not any(isinstance(value, torch.Tensor) for value in values)
    first, rest = values[:ROOM], values[ROOM:]
    total = partial(_total, group=group, device=device, largest=largest)
    with torch.no_grad():
        sent = _marks_on_host(len(first), marks) if on_host else _marks_on(values[0].device, len(first), marks)
        join = np.concatenate if on_host else torch.cat
        reduced = total(join([_vector(first, on_host), sent]))
        tail = slice(-len(marks), None)
        # Marks are integers, so sums are exact. Only if all members have the same mark is the sum n times this
        # process's mark.
        same = reduced[tail] == sent[tail] * (1 if largest else len(group.ranks))
        found = [*reduced[: len(first)]]
        if rest:
            # Reducing vectors of different lengths would fail or hang. On a device the marks are not read, because that
            # would wait.
            found += rest if on_host and not all(same[:2]) else [*total(_vector(rest, on_host))]
    return found, same


def _vector(values: Sequence[Any], on_host: bool) -> Any:
    return np.array(values, np.float64) if on_host else torch.stack(list(values))


def _marks_on_host(taken: int, marks: Sequence[float]) -> Any:
    return np.array([0.0] * (ROOM - taken) + list(marks))


def _marks_on(device: torch.device, taken: int, marks: Sequence[float]) -> torch.Tensor:
    """Return the rest of a vector, filled on the device, because a copy from the host would wait."""
    sent = torch.zeros(ROOM - taken + len(marks), dtype=torch.float64, device=device)
    for place, mark in enumerate(marks, ROOM - taken):
        if mark:
            sent[place].fill_(mark)
    return sent


def _total(vector: np.ndarray | torch.Tensor, group: Group, device: torch.device, largest: bool) -> Any:
    """Return the sum or maximum of all members' vectors, in the same place and form as the own vector."""
    on_host = isinstance(vector, np.ndarray)
    # The group may support only its own devices, as NCCL does.
    reduced = (torch.from_numpy(vector) if isinstance(vector, np.ndarray) else vector).to(device)
    try:
        dist.all_reduce(reduced, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group.handle)
    except RuntimeError as error:
        raise RuntimeError(
            f"the norm could not be reduced over the ranks {listed(group.ranks)}: one of them has "
            "ended, did not make the call, or lists its groups in a different order. No gradient has been changed "
            "here. "
            f"{error}"
        ) from error
    return reduced.cpu().numpy() if on_host else reduced.to(vector.device)


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank()


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
