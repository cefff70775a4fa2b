"""Which process groups each gradient is sharded over, and in which order the norm is reduced over the groups.

Gradients sharded over the same groups share accumulators. The groups are processed one after another. For each group,
one call reduces all accumulators that need it. Accumulators that then have the same groups left are added and continue
as one. Accumulators with no group left are complete; a replicated gradient has no group and counts once.

The shardings depend only on the layout of the parameters and on the named groups, never on which gradients exist. So
every process makes the same calls, whether it holds all, some or no gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any

from gradclip.backends.torch.distributed import layouts, sharded_over
from gradclip.backends.torch.process_groups import Group, groups
from gradclip.core.arrays import Arrays
from gradclip.core.protocols import Backend
from gradclip.parameters import UNNAMED, ParameterList

Sharding = tuple[Group, ...]
"""The groups over which a gradient is sharded, in the order in which its norm is reduced."""


class Shardings:
    """All shardings, the same list on every process, and the index of each local gradient's sharding."""

    def __init__(self, params: ParameterList, named: Sequence[Any]) -> None:
        self._all, self._of_gradients = _all_shardings(params, groups(named))
        self.groups, self._in_both_orders = _sequence(self._all)
        self._place = {group: place for place, group in enumerate(self.groups)}
        if self._in_both_orders:
            self._all = list(dict.fromkeys(tuple(sorted(one, key=self._place.__getitem__)) for one in self._all))

    def __len__(self) -> int:
        return len(self._all)

    def check_orders(self) -> None:
        """Raise ValueError if two groups are named in both orders. The reductions of such a call still end."""
        if self._in_both_orders:
            raise ValueError(
                "two process groups are named in one order for some parameters and in the opposite order for others. "
                "Name them in the same order everywhere."
            )

    def described(self) -> str:
        """Describe in words which groups the gradients are sharded over, in which order."""
        ways = [" then ".join(f"ranks {', '.join(map(str, group.ranks))}" for group in one) for one in self._all]
        return "splits over " + " and over ".join(filter(None, ways))

    def over(self, group: Group) -> list[int]:
        """Return the indices of the shardings that include a group."""
        return [number for number, sharding in enumerate(self._all) if group in sharding]

    def divided(self, backend: Backend, arrays: Arrays) -> list[Arrays]:
        """Return the arrays of each sharding, measured as precisely as float64: other processes may hold that."""
        if len(self._all) == 1:
            return [arrays.as_precise_as(["float64"])]
        indices: list[list[int]] = [[] for _ in self._all]
        for index, number in enumerate(self._of_gradients):
            indices[number].append(index)
        return [backend.chosen(arrays, chosen).as_precise_as(["float64"]) for chosen in indices]

    def reduced(
        self,
        flags: list[Any],
        known: Sequence[list[Any]],
        merge: Callable[[Any, Any], Any],
        reduce: Callable[[list[Any], Group, tuple[int, ...]], list[Any]],
    ) -> tuple[list[Any], list[Any]]:
        """Reduce the accumulators of all shardings to one, group by group, together with the flags.

        `reduce` takes a list of numbers (equally long on every member of a group), the group, and a tuple that must be
        the same on all members: whether some gradients are sharded over no group, and the number of groups left for
        each sharding. `merge` combines two accumulators of this process.
        """
        waiting = dict(zip(self._all, known, strict=True))
        length = len(known[0])
        for group in self.groups:
            first = sorted((sharding for sharding in waiting if sharding[:1] == (group,)), key=self._places)
            lengths = (() in self._all, *map(len, first))
            flat = reduce([*flags, *(number for sharding in first for number in waiting.pop(sharding))], group, lengths)
            flags, flat = flat[: len(flags)], flat[len(flags) :]
            for position, sharding in enumerate(first):
                reduced = flat[position * length : (position + 1) * length]
                rest = sharding[1:]
                other = waiting.get(rest)
                waiting[rest] = reduced if other is None else list(map(merge, other, reduced))
        return flags, waiting[()]

    def _places(self, sharding: Sharding) -> list[int]:
        return [self._place[group] for group in sharding]


def _all_shardings(params: ParameterList, default: Sharding) -> tuple[list[Sharding], list[int]]:
    parameters, gradients = params.parameters, params.gradients
    beside = {id(one): default if one is UNNAMED else groups(one) for one in params.beside}
    named = [beside.get(id(one), default) for one in params.beside_each()]
    every = list(zip(layouts(parameters), layouts(gradients), map(id, named), strict=True))
    found = dict.fromkeys(sharding for sharding in (default, *beside.values()) if sharding)
    of_layout: dict[Any, Sharding] = {}
    for layout in dict.fromkeys(every):
        at = every.index(layout)
        shardings = sharded_over(parameters[at], gradients[at], named[at])
        found.update(dict.fromkeys(shardings))
        of_layout[layout] = shardings[-1]
    if len(found) < 2:
        return list(found) or [()], []
    number_of = {sharding: number for number, sharding in enumerate(found)}
    of_gradients: dict[int, int] = {}
    for layout, parameter, gradient in zip(every, parameters, gradients, strict=True):
        if gradient is not None:
            of_gradients.setdefault(id(parameter), number_of[of_layout[layout]])
    return list(found), list(of_gradients.values())


def _sequence(shardings: Sequence[Sharding]) -> tuple[list[Group], bool]:
    """Return all groups, each one after those that precede it in any sharding, and whether two occur in both orders.

    Then the order named first decides.

    Apart from that, the order depends only on the groups' ranks, so it is the same on all processes. Otherwise one
    process could wait in one group for a process that waits in another.
    """
    waiting, order, in_both = list(shardings), [], False
    while any(waiting):
        seen = dict.fromkeys(group for sharding in waiting for group in sharding)
        ready = [group for group in seen if not any(group in sharding[1:] for sharding in waiting)]
        in_both = in_both or not ready
        order.append(min(ready, key=_in_all_processes) if ready else next(iter(seen)))
        waiting = [tuple(group for group in sharding if group != order[-1]) for sharding in waiting]
    return order, in_both


def _in_all_processes(group: Group) -> tuple[list[int], tuple[int, ...]]:
    """Return a sort key: groups along one dimension of a mesh first, then along the next."""
    return [rank - group.ranks[0] for rank in group.ranks], group.ranks
