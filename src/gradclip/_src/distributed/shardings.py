"""Which process groups each gradient is sharded over, said or not, and in which order its norm is reduced over them.

Gradients sharded over the same groups share accumulators. The groups are processed one after another. For each group,
one call reduces all accumulators that need it. Accumulators that then have the same groups left are added and continue
as one. Accumulators with no group left are complete; a replicated gradient has no group and counts once.

The shardings depend only on the layout of the parameters and on the named groups, never on which gradients exist. So
every process makes the same calls, whether it holds all, some or no gradients.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from gradclip._src.backends.torch.distributed import fsdp1_shard, layouts, layouts_with_axes, sharded_over
from gradclip._src.backends.torch.process_groups import Group, groups, rank
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.protocols import Backend
from gradclip._src.passed.parameters import UNNAMED, ParameterList


def check_unsaid(params: ParameterList) -> None:
    """Check for sharded or missing parameters when no argument names the processes that hold the rest.

    Raises ValueError for FSDP1 shards. Warns if one of several processes passes an empty list.
    """
    if not params.parameters and params.tree is None and not params.unmatched:
        warnings.warn(
            f"this process, rank {rank()}, passes no parameters. Its norm is 0, and processes that "
            "hold distributed tensors will wait for it. Pass the parameters even if they have no gradients, or pass "
            "process_group=. If this process is meant to be alone, pass process_group=[].",
            RuntimeWarning,
            stacklevel=4,
        )
    unsaid = [p for p, beside in zip(params.parameters, params.beside_each(), strict=True) if beside is UNNAMED]
    at = fsdp1_shard(unsaid)
    if at is not None:
        raise ValueError(
            "the parameters are shards of FullyShardedDataParallel (FSDP1), and no argument names the processes that "
            "hold the other shards. Pass process_group=model.process_group, where model is the FSDP module. With "
            "NO_SHARD every process holds everything: pass process_group=[]."
        )


def check_shows_units(params: ParameterList) -> None:
    """Raise a ValueError for shards of FSDP1: they are flat, so that rows cannot be told apart."""
    at = fsdp1_shard(params.parameters)
    if at is not None:
        raise ValueError(
            f"{params.name(at)} is a flat shard of FullyShardedDataParallel (FSDP1), which does not show its units. "
            "Use fully_shard (FSDP2), or call gradclip.clip_grad_layer_norm_ or gradclip.clip_grad_norm_."
        )


Sharding = tuple[Group, ...]
"""The groups over which a gradient is sharded, in the order in which its norm is reduced."""


class Shardings:
    """All shardings, the same list on every process, and the index of each local gradient's sharding.

    If there is only one sharding, and every gradient counts, `of_gradients` is empty. Gradients that another process
    counts have the index -1.
    """

    def __init__(self, params: ParameterList, named: Sequence[Any]) -> None:
        self.all, self.of_gradients, self._of_parameters = _all_shardings(params, groups(named))
        self._mark(params)
        self._units = partial(_of_units, params, groups(named))
        self.groups, self._in_both_orders = _sequence(self.all)
        self._place = {group: place for place, group in enumerate(self.groups)}
        if self._in_both_orders:
            self.all = list(dict.fromkeys(tuple(sorted(one, key=self._place.__getitem__)) for one in self.all))

    def _mark(self, params: ParameterList) -> None:
        shared = params.shared
        if shared:
            every = zip(params.parameters, params.gradients, strict=True)
            holders = dict.fromkeys(id(parameter) for parameter, gradient in every if gradient is not None)
            numbers = zip(holders, self.of_gradients or [0] * len(holders), strict=True)
            self.of_gradients = [-1 if holder in shared else number for holder, number in numbers]

    def counting(self, indices: Iterable[int]) -> list[int]:
        """Return those of the indices of gradients that this process counts."""
        return [index for index in indices if not self.of_gradients or self.of_gradients[index] >= 0]

    def __len__(self) -> int:
        return len(self.all)

    def check_orders(self) -> None:
        """Raise ValueError if two groups are named in both orders. The reductions of such a call still end."""
        if self._in_both_orders:
            raise ValueError(
                "two process groups are named in one order for some parameters and in the opposite order for others. "
                "Name them in the same order everywhere."
            )

    def described(self) -> str:
        """Describe in words which groups the gradients are sharded over, in which order."""
        ways = [" then ".join(f"ranks {', '.join(map(str, group.ranks))}" for group in one) for one in self.all]
        return "splits over " + " and over ".join(filter(None, ways))

    def over(self, group: Group) -> list[int]:
        """Return the indices of the shardings that include a group."""
        return [number for number, sharding in enumerate(self.all) if group in sharding]

    def of_layers(self, count: int) -> list[Sharding]:
        """Return the sharding of each of `count` different parameters or its gradient, or of the arrays of a tree."""
        if not self._of_parameters:
            return self.all[:1] * count
        return [self._in_order(sharding) for sharding in self._of_parameters.values()]

    def of_units(self, own: Sequence[Sequence[int]]) -> list[Sharding]:
        """Return the same for the units of each: the groups over which elements of one unit are split.

        `own` are the axes of each that index its units.
        """
        return list(map(self._in_order, self._units(own))) if self._of_parameters else self.all[:1] * len(own)

    def _in_order(self, sharding: Sharding) -> Sharding:
        return tuple(sorted(sharding, key=self._place.__getitem__))

    def uncounted(self) -> list[int]:
        """Return the indices of the gradients that another process counts."""
        return [index for index, number in enumerate(self.of_gradients) if number < 0]

    def divided(self, backend: Backend, arrays: Arrays) -> list[Arrays]:
        """Return the arrays of each sharding, measured as precisely as float64: other processes may hold that."""
        if len(self.all) == 1 and not self.of_gradients:
            return [arrays.as_precise_as(["float64"])]
        indices: list[list[int]] = [[] for _ in self.all]
        numbers = self.of_gradients
        if len(arrays) > len(numbers):  # with something in the place of each gradient that is missing
            numbers = [self.all.index(sharding) for sharding in self.of_layers(len(arrays))]
        for index, number in enumerate(numbers):
            if number >= 0:
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
        waiting = dict(zip(self.all, known, strict=True))
        length = len(known[0])
        for group in self.groups:
            first = sorted((sharding for sharding in waiting if sharding[:1] == (group,)), key=self._places)
            lengths = (() in self.all, *map(len, first))
            flat = reduce([*flags, *(number for sharding in first for number in waiting.pop(sharding))], group, lengths)
            flags, flat = flat[: len(flags)], flat[len(flags) :]
            for position, sharding in enumerate(first):
                reduced = flat[position * length : (position + 1) * length]
                rest = sharding[1:]
                other = waiting.get(rest)
                waiting[rest] = reduced if other is None else list(map(merge, other, reduced))
        return flags, waiting[()]

    def reduced_each(
        self,
        flags: list[Any],
        vectors: Mapping[Sharding, Any],
        reduce: Callable[[list[Any], Group, tuple[int, ...]], Any],
        cut: Callable[[Any, Sequence[int]], Sequence[Any]],
    ) -> tuple[list[Any], dict[Sharding, Any]]:
        """Reduce one vector for each sharding, group by group, together with the flags. Vectors are never merged.

        `reduce` takes a list of scalars and vectors, and returns one vector. `cut` splits that into parts of such
        lengths.
        """
        left, found = {sharding: sharding for sharding in vectors}, dict(vectors)
        for group in self.groups:
            here = sorted((sharding for sharding in left if left[sharding][:1] == (group,)), key=self._places)
            sizes = [len(found[sharding]) for sharding in here]
            lengths = (*(len(left[sharding]) for sharding in here), *sizes)
            numbers, *parts = cut(reduce([*flags, *(found[one] for one in here)], group, lengths), [len(flags), *sizes])
            flags = list(numbers)
            for sharding, part in zip(here, parts, strict=True):
                left[sharding], found[sharding] = left[sharding][1:], part
        return flags, found

    def added(
        self, numbers: Mapping[Sharding, list[Any]], add_up: Callable[[list[Any], Group], list[Any]]
    ) -> dict[Sharding, list[Any]]:
        """Return the sums over all processes of the numbers of each sharding; `add_up` adds those of one group.

        Groups whose members all have no numbers are left out.
        """
        left, found = {sharding: sharding for sharding, mine in numbers.items() if mine}, dict(numbers)
        for group in self.groups:
            here = sorted((sharding for sharding in left if left[sharding][:1] == (group,)), key=self._places)
            rest = add_up([number for one in here for number in found[one]], group) if here else []
            for sharding in here:
                count = len(found[sharding])
                left[sharding], found[sharding], rest = left[sharding][1:], rest[:count], rest[count:]
        return found

    def _places(self, sharding: Sharding) -> list[int]:
        return [self._place[group] for group in sharding]


def _named(params: ParameterList, default: Sharding) -> tuple[dict[int, Sharding], list[Sharding]]:
    """Return the groups that each parameter group names, and those that are named for each parameter."""
    beside = {id(one): default if one is UNNAMED else groups(one) for one in params.beside}
    return beside, [beside.get(id(one), default) for one in params.beside_each()]


def _of_units(params: ParameterList, default: Sharding, own: Sequence[Sequence[int]]) -> list[Sharding]:
    _, named = _named(params, default)
    laid = zip(layouts_with_axes(params.parameters), layouts_with_axes(params.gradients), strict=True)
    every = zip(params.parameters, params.gradients, named, laid, strict=True)
    each = {id(parameter): (parameter, grad, near, lying) for parameter, grad, near, lying in every}
    known: dict[Any, Sharding] = {}
    found = []
    for (parameter, grad, near, lying), axes in zip(each.values(), own, strict=True):
        key = lying, id(near), tuple(axes)
        if key not in known:
            known[key] = sharded_over(parameter, grad, near, axes)[-1]
        found.append(known[key])
    return found


def _all_shardings(params: ParameterList, default: Sharding) -> tuple[list[Sharding], list[int], dict[int, Sharding]]:
    parameters, gradients = params.parameters, params.gradients
    beside, named = _named(params, default)
    every = list(zip(layouts(parameters), layouts(gradients), map(id, named), strict=True))
    found = dict.fromkeys(sharding for sharding in (default, *beside.values()) if sharding)
    of_layout: dict[Any, Sharding] = {}
    for layout in dict.fromkeys(every):
        at = every.index(layout)
        shardings = sharded_over(parameters[at], gradients[at], named[at])
        found.update(dict.fromkeys(shardings))
        of_layout[layout] = shardings[-1]
    of_parameters = {id(p): of_layout[layout] for p, layout in zip(parameters, every, strict=True)}
    if len(found) < 2:
        return list(found) or [()], [], of_parameters
    number_of = {sharding: number for number, sharding in enumerate(found)}
    of_gradients: dict[int, int] = {}
    for layout, parameter, gradient in zip(every, parameters, gradients, strict=True):
        if gradient is not None:
            of_gradients.setdefault(id(parameter), number_of[of_layout[layout]])
    return list(found), list(of_gradients.values()), of_parameters


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
