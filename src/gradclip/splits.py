"""Over which groups of processes gradients are split, and how what each holds is reduced over them.

Group after group, all vectors that have to be reduced over it are reduced in one call; those that then have the same
groups before them are added up and go on as one. What has no group before it is held by everyone, and counts once.
Which vectors there are follows from the layout of the parameters and from the groups that were named, never from the
gradients at hand. So every process makes the same calls, whether it holds all, some or none of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from gradclip.backends import Backend, distributed
from gradclip.backends.arrays import Arrays
from gradclip.members import UNNAMED, Members

Split = tuple[Any, ...]
"""The groups over which a gradient is split, in the order in which its norm is reduced."""


class Splits:
    """Every split that there is, on every process the same, and the number of that of each gradient here."""

    def __init__(self, members: Members, named: Sequence[Any]) -> None:
        self._all, self._of_gradients = _all_splits(members, distributed().groups(named))
        self.groups = _sequence(self._all)
        self._place = {group: place for place, group in enumerate(self.groups)}

    def __len__(self) -> int:
        return len(self._all)

    def keep(self, indices: Sequence[int]) -> None:
        """Forget the gradients here of which the index is none of these."""
        if self._of_gradients:
            self._of_gradients = [self._of_gradients[index] for index in indices]

    def described(self) -> str:
        """Return in words over which groups gradients are split, in which order."""
        ways = [" then ".join(f"ranks {', '.join(map(str, group.ranks))}" for group in split) for split in self._all]
        return "splits over " + " and over ".join(filter(None, ways))

    def over(self, group: Any) -> list[int]:
        """Return the numbers of the splits over a group and, perhaps, others."""
        return [number for number, split in enumerate(self._all) if group in split]

    def divided(self, backend: Backend, arrays: Arrays) -> list[Arrays]:
        """Return the arrays of each split."""
        if len(self._all) == 1:
            return [arrays]
        indices: list[list[int]] = [[] for _ in self._all]
        for index, number in enumerate(self._of_gradients):
            indices[number].append(index)
        return [backend.chosen(arrays, chosen) for chosen in indices]

    def reduced(
        self,
        flags: list[Any],
        vectors: Sequence[list[Any]],
        merge: Callable[[Any, Any], Any],
        reduce: Callable[[list[Any], Any, tuple[int, ...]], list[Any]],
    ) -> tuple[list[Any], list[Any]]:
        """Reduce the vectors of all splits to one, over one group after the other, and the flags with them.

        `reduce` takes as many numbers of every member of a group, the group, and what has to be the same for all of
        them: whether some gradients are split over no group, and over how many groups each vector has to be reduced.
        `merge` takes two vectors in this process.
        """
        waiting = dict(zip(self._all, vectors, strict=True))
        length = len(vectors[0])
        for group in self.groups:
            first = sorted((split for split in waiting if split[:1] == (group,)), key=self._places)
            lengths = (() in self._all, *map(len, first))
            flat = reduce([*flags, *(number for split in first for number in waiting.pop(split))], group, lengths)
            flags, flat = flat[: len(flags)], flat[len(flags) :]
            for position, split in enumerate(first):
                vector = flat[position * length : (position + 1) * length]
                other = waiting.get(split[1:])
                waiting[split[1:]] = vector if other is None else list(map(merge, other, vector))
        return flags, waiting[()]

    def _places(self, split: Split) -> list[int]:
        return [self._place[group] for group in split]


def _all_splits(members: Members, default: Split) -> tuple[list[Split], list[int]]:
    module, parameters, gradients = distributed(), members.parameters, members.gradients
    beside = {id(one): default if one is UNNAMED else module.groups(one) for one in members.beside}
    named = [beside.get(id(one), default) for one in members.beside_each()]
    layouts = list(zip(module.layouts(parameters), module.layouts(gradients), map(id, named), strict=True))
    found = dict.fromkeys(split for split in (default, *beside.values()) if split)
    of_layout: dict[Any, Split] = {}
    for layout in dict.fromkeys(layouts):
        at = layouts.index(layout)
        splits = module.split_over(parameters[at], gradients[at], named[at])
        found.update(dict.fromkeys(splits))
        of_layout[layout] = splits[-1]
    if len(found) < 2:
        return list(found) or [()], []
    number_of = {split: number for number, split in enumerate(found)}
    of_gradients: dict[int, int] = {}
    for layout, gradient in zip(layouts, gradients, strict=True):
        of_gradients.setdefault(id(gradient), number_of[of_layout[layout]])
    of_gradients.pop(id(None), None)
    return list(found), list(of_gradients.values())


def _sequence(splits: Sequence[Split]) -> list[Any]:
    """Return all groups, each after those that stand before it in any split.

    Otherwise they come in one order for all processes, whatever stands first in the list of one, so that none waits in
    one group for a process that waits for it in another.

    Raises ValueError where two stand in one order here and in the other there.
    """
    waiting, order = list(splits), []
    while any(waiting):
        seen = dict.fromkeys(group for split in waiting for group in split)
        ready = [group for group in seen if not any(group in split[1:] for split in waiting)]
        if not ready:
            raise ValueError(
                "two process groups are named in one order for some parameters and in the other order for others; "
                "name them in the same order everywhere."
            )
        order.append(min(ready, key=_in_all_processes))
        waiting = [split[1:] if split[:1] == (order[-1],) else split for split in waiting]
    return order


def _in_all_processes(group: Any) -> tuple[list[int], tuple[int, ...]]:
    """Return a key that orders all groups: along one dimension of a mesh first, then along another."""
    return [rank - group.ranks[0] for rank in group.ranks], group.ranks
