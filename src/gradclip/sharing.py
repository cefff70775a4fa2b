"""The norm of gradients that are split over processes, with the same few collectives on each of them.

The gradients that are split over the same groups of processes share one vector (`shards`). Group after group, all
vectors that have to be reduced over it are reduced in one call; those that then have the same groups before them are
added up and go on as one. What has no group before it is held by everyone, and counts once. Which vectors there are
follows from the layout of the parameters and from the groups that were named, never from the gradients at hand. So
every process makes the same calls, whether it holds all, some or none of them.

Three numbers travel along: how many vectors are added up, which bounds the rounding; how many processes hold float64;
how many could not prepare their gradients, so that a mistake on one ends the call on all.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from gradclip import exact, policy, shards
from gradclip.backends import Backend, any_distributed, distributed
from gradclip.backends.arrays import Arrays
from gradclip.backends.formats import FLOAT64
from gradclip.backends.numpy import HOST
from gradclip.members import UNNAMED, Members, as_tuple
from gradclip.norms import Norm, Order, measure

Split = tuple[Any, ...]
"""The groups over which a gradient is split, in the order in which its norm is reduced."""


class Sharing:
    """What one call has to know of the processes that hold parts of its gradients."""

    def __init__(self, members: Members, named: Sequence[Any], order: Order, nonfinite: str) -> None:
        self._module = distributed()
        self._order = shards.check_order(order)
        self._nonfinite = nonfinite
        self._default = self._module.groups(named)
        self._splits, self._of_gradients = self._all_splits(members)
        self._groups = _sequence(self._splits)
        self._device = self._module.device_for(self._groups, members.parameters)
        self._looks = self._device.type == "cpu" or nonfinite == "raise"
        self._holds_float64 = False

    @classmethod
    def of(
        cls, members: Members, process_group: Any, mesh: Any, order: Order, nonfinite: str = "propagate"
    ) -> "Sharing | None":
        """Return it, or None where all gradients belong to this process alone."""
        named = (*as_tuple(process_group), *as_tuple(mesh))
        alone = not named and all(beside is UNNAMED for beside in members.beside)
        if alone and not any_distributed(members.parameters) and not any_distributed(members.gradients):
            return None
        return cls(members, named, order, nonfinite)

    def _all_splits(self, members: Members) -> tuple[list[Split], list[int]]:
        """Return every split that there is, on every process the same, and the number of that of each gradient here."""
        module, parameters, gradients = self._module, members.parameters, members.gradients
        beside = {id(one): self._default if one is UNNAMED else module.groups(one) for one in members.beside}
        named = [beside.get(id(one), self._default) for one in members.beside_each()]
        layouts = list(zip(module.layouts(parameters), module.layouts(gradients), map(id, named), strict=True))
        found = dict.fromkeys(split for split in (self._default, *beside.values()) if split)
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

    # The norm

    def norm(self, backend: Backend, arrays: Arrays) -> Norm:
        """Return the norm of what all processes hold, of which this one has `arrays`."""
        shards.check_wide(backend)
        vectors = [self._vector(backend, some) for some in self._by_split(backend, arrays)]
        numbers = [float(len(vectors)), float(FLOAT64 in arrays.formats), 0.0]
        flags = [backend.scalar(number, arrays) for number in numbers]
        (holders, wide, failed), total = self._measures(backend.xp, flags, vectors)
        if self._looks:
            self._check_all_prepared(failed)
        self._holds_float64 = bool(wide > 0) if backend.concrete else FLOAT64 in arrays.formats
        norm = shards.norm_of(backend, total, self._order, holders)
        return Norm(backend.xp.where(failed > 0, np.nan, norm.value), norm.divisor, norm.error, norm.floor)

    def norm_dtype(self) -> str:
        """Return the dtype of the norm: float64 if a process holds that, or, unseen, if this one does."""
        return "float64" if self._holds_float64 else "float32"

    def nothing(self) -> Any:
        """Return a tensor without elements, for a process that has no gradient."""
        return self._module.nothing(self._device)

    @property
    def on_host(self) -> bool:
        """Whether all processes reduce on the host, so that each may look at what comes of it."""
        return bool(self._device.type == "cpu")

    def fits(self, backend: Backend, arrays: Arrays, max_norm: float) -> bool:
        """Say in exact arithmetic whether the norm of what all processes hold is at most `max_norm`.

        False also where that cannot be told. All processes have to ask, as they do: what makes them is the norm.
        """
        vectors = [[self._power_sum(backend, some)] for some in self._by_split(backend, arrays)]
        _, (total,) = self._over_groups([], vectors, operator.add, self._module.add_up)
        return isinstance(total, Fraction) and total <= Fraction(max_norm) ** int(self._order.p)

    def _power_sum(self, backend: Backend, some: Arrays) -> Fraction | float:
        p = self._order.p
        if not backend.concrete or (p != 2 and some.any_complex):
            return math.nan
        return exact.power_sum(*exact.chunks_of(backend, some), p)

    def _by_split(self, backend: Backend, arrays: Arrays) -> list[Arrays]:
        """Return the arrays of each split."""
        if len(self._splits) == 1:
            return [arrays]
        indices: list[list[int]] = [[] for _ in self._splits]
        for index, number in enumerate(self._of_gradients):
            indices[number].append(index)
        return [backend.chosen(arrays, chosen) for chosen in indices]

    def _vector(self, backend: Backend, some: Arrays) -> list[Any]:
        norm = measure(backend, some, self._order)
        return shards.vector(backend.xp, norm, self._order, empty=not some.elements())

    def _measures(self, xp: Any, flags: list[Any], vectors: Sequence[list[Any]]) -> tuple[list[Any], list[Any]]:
        """Reduce the vectors of all splits to one, and the flags with them, on the device of the processes."""
        largest = self._order.extreme
        reduce = partial(self._module.reduce, device=self._device, largest=largest)
        return self._over_groups(flags, vectors, xp.maximum if largest else xp.add, reduce)

    def _over_groups(
        self,
        flags: list[Any],
        vectors: Sequence[list[Any]],
        merge: Callable[[Any, Any], Any],
        reduce: Callable[[list[Any], Any], list[Any]],
    ) -> tuple[list[Any], list[Any]]:
        """Reduce the vectors of all splits to one, over one group after the other, and the flags with them."""
        waiting = dict(zip(self._splits, vectors, strict=True))
        length = len(vectors[0])
        for group in self._groups:
            first = [split for split in waiting if split[:1] == (group,)]
            flat = reduce([*flags, *(number for split in first for number in waiting.pop(split))], group)
            flags, flat = flat[: len(flags)], flat[len(flags) :]
            for position, split in enumerate(first):
                vector = flat[position * length : (position + 1) * length]
                other = waiting.get(split[1:])
                waiting[split[1:]] = vector if other is None else list(map(merge, other, vector))
        return flags, waiting[()]

    # Errors, which end the call on every process

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Take part in the collectives all the same where an error ends the preparation, and tell the others of it."""
        try:
            yield
        except Exception as error:
            self._tell(error)
            raise

    def _tell(self, error: Exception) -> None:
        vectors = [self._vector(HOST, HOST.enter([])) for _ in self._splits]
        again = self._nonfinite == "zero" and not self._looks
        for _ in range(1 + again):
            self._measures(HOST.xp, [np.float64(0), np.float64(0), np.float64(1)], vectors)
        if self._looks:
            self._exchange([f"{type(error).__name__}: {error}"])

    def _check_all_prepared(self, failed: Any) -> None:
        if failed > 0:
            raise RuntimeError(
                "another process could not prepare its gradients, so that there is no norm of all: "
                f"{'; '.join(self._exchange([]))} Nothing has been changed."
            )

    def raise_nonfinite(self, backend: Backend, arrays: Arrays, names: Sequence[str]) -> None:
        """Raise a FloatingPointError that names each process and gradient which holds NaN or infinities."""
        found = self._exchange(policy.nonfinite_leaves(backend, arrays, names))
        raise FloatingPointError(policy.explained(f"in {len(found)} leaves", found))

    def _exchange(self, messages: Sequence[str]) -> list[str]:
        own = [f"rank {self._module.rank()}: {message}" for message in messages]
        return list(self._module.exchange(own, self._groups))


def _sequence(splits: Sequence[Split]) -> list[Any]:
    """Return all groups, each after those that stand before it in any split.

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
        order.append(ready[0])
        waiting = [split[1:] if split[:1] == (ready[0],) else split for split in waiting]
    return order
