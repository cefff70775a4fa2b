"""Many norms of sharded gradients, all reduced as one vector for each process group.

A norm of a layer or unit is split over the process groups over which its elements are. Norms that are split in the
same way are entries of one vector of accumulators. For each group, one call reduces all vectors that need it. Norms
that one process knows alone, such as those of rows where each process has some of the rows, are not sent.

Which norms are split in which way follows from the parameters, never from which gradients exist: a process without a
gradient sends nothing for it, in its place. So every process makes the same calls with vectors of the same lengths.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from itertools import chain, pairwise
from types import ModuleType
from typing import Any

import numpy as np

from gradclip._src.backends.host import exact
from gradclip._src.backends.torch.process_groups import Group, add_up, cut
from gradclip._src.core import accumulators
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.holders import Held, Together
from gradclip._src.core.layouts import Groups, Rows, Several
from gradclip._src.core.norms import Norm, Order
from gradclip._src.core.protocols import Backend, is_concrete
from gradclip._src.distributed.sent import Attempts, filled_each, joined, length
from gradclip._src.distributed.shardings import Sharding, Shardings

Vectors = dict[Sharding, list[Any]]
"""For each sharding, the accumulators of its norms: a list of vectors."""

Reduce = Callable[[list[Any], Group, tuple[int, ...]], Any]


class ManyNorms(Together):
    """The processes that share many norms.

    `flags` makes those of this process, and `hear` takes the reduced ones, and returns whether the call can go on.
    `look` takes the arrays before.
    """

    def __init__(
        self,
        shardings: Shardings,
        reduce: Reduce,
        flags: Callable[[Backend, Arrays, int, Any], list[Any]],
        hear: Callable[[Backend, list[Any]], Any],
        look: Callable[[Backend, Arrays], None],
    ) -> None:
        self._shardings, self._reduce, self._flags, self._hear, self._look = shardings, reduce, flags, hear, look
        self._holders: Any = 1.0
        self._known: tuple[Several, _Shares] | None = None

    def measure_parts(self, backend: Backend, parts: Sequence[Held], order: Order) -> list[Norm]:
        """Return the norms over all processes, with one reduction over each group."""
        accumulators.check_wide(backend)
        xp, shares = backend.xp, self._shares(parts[0].layout)
        self._look(backend, parts[0].arrays)
        sent = [shares.filled(backend, part, order) for part in parts]
        finite = sent[0][1] if len(sent) == 1 else xp.all(xp.stack([one for _, one in sent]))
        own = self._flags(backend, parts[0].arrays, 1, finite)
        vectors = {sharding: joined(xp, [x for each, _ in sent for x in each[sharding]]) for sharding in sent[0][0]}
        reached, found = self._shardings.reduced_each(own, vectors, self._reduce, cut)
        self._holders, sure = reached[0], self._hear(backend, reached)
        # Which other processes have sent something is not known for each norm.
        holders = shares.of_one * math.prod(len(group.ranks) for group in self._shardings.groups)
        many = accumulators.length(order)
        norms = []
        for number in range(len(parts)):
            own_of = {one: _equal_parts(x, many * len(parts))[number * many :][:many] for one, x in found.items()}
            norm = accumulators.norm_of(backend, shares.joined(xp, own_of, order), order, float(holders))
            norms.append(Norm(xp.where(sure, norm.value, math.nan), norm.divisor, norm.error, norm.floor))
        return norms

    def finite(self, backend: Backend) -> Any:
        """Return whether all elements that the last call measured are finite, on every process."""
        return backend.xp.isfinite(self._holders)

    def at_most_each(
        self, backend: Backend, part: Held, order: Order, max_norms: np.ndarray, unclear: np.ndarray
    ) -> Any:
        """Return which of the `unclear` norms are at most their thresholds.

        Members of a group find the same norms, so they agree on whether to exchange exact sums.
        """
        kept, shares = [False] * len(unclear), self._shares(part.layout)
        places: dict[Sharding, list[int]] = {sharding: [] for sharding in shares.shardings}
        for place in [place for place, one in enumerate(unclear) if one]:
            sharding = shares.sharding_at(place)
            if sharding is not None:
                places[sharding].append(place)
        attempts = Attempts()
        sums = {
            sharding: [attempts.of(partial(self._power_sum, backend, part, order.p, place)) for place in chosen]
            for sharding, chosen in places.items()
        }
        found = self._shardings.added(sums, add_up)
        attempts.check(chain.from_iterable(found.values()))
        for sharding, totals in found.items():
            for place, total in zip(places[sharding], totals, strict=True):
                limit = Fraction(float(max_norms[place])) ** int(order.p) if isinstance(total, Fraction) else 0
                kept[place] = isinstance(total, Fraction) and total <= limit
        return kept

    def _power_sum(self, backend: Backend, part: Held, p: float, place: int) -> Fraction | float:
        if not is_concrete(backend):
            return math.nan
        if isinstance(part.layout, Groups) and not part.layout.alone:
            chosen = self._shardings.counting(part.layout.groups[place])
            return exact.power_sum(backend, backend.chosen(part.arrays, chosen), p)
        return exact.power_sum(backend, _elements(backend, part, place), p)

    def _shares(self, layout: Several) -> "_Shares":
        if self._known is None or self._known[0] is not layout:
            self._known = layout, self._made(layout)
        return self._known[1]

    def _made(self, layout: Several) -> "_Shares":
        if isinstance(layout, Rows):
            homes = self._shardings.of_units([units.own for units in layout.units])
            return _OneWay(layout, homes)
        if layout.alone:
            return _OneWay(layout, self._shardings.of_layers(layout.number))
        return _AnyWay(layout, self._shardings)


class _OneWay:
    """Norms each of which is split in one way: those of one parameter. `homes` has the sharding of each parameter."""

    of_one = 1

    def __init__(self, layout: Several, homes: Sequence[Sharding]) -> None:
        if len(homes) != layout.number:
            raise AssertionError("norms of parameters need the gradient of each parameter, or nothing in its place")
        self._homes = homes
        self.shardings = list(dict.fromkeys(homes)) or [()]
        self._ends = [layout.places(number).stop for number in range(layout.number)]
        self._runs: dict[Sharding, list[tuple[int, int]]] = {sharding: [] for sharding in self.shardings}
        self._lengths = [length(layout, number) for number in range(layout.number)]
        for home, end, count in zip(homes, self._ends, self._lengths, strict=True):
            runs = self._runs[home]
            if runs and runs[-1][1] == end - count:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((end - count, end))

    def filled(self, backend: Backend, held: Held, order: Order) -> tuple[Vectors, Any]:
        known, finite = filled_each(backend, held, order)
        if len(self.shardings) == 1:
            return {self.shardings[0]: known}, finite
        xp = backend.xp
        return {
            sharding: [joined(xp, [x[start:end] for start, end in runs]) for x in known]
            for sharding, runs in self._runs.items()
        }, finite

    def joined(self, xp: ModuleType, found: Vectors, order: Order) -> list[Any]:
        if len(found) == 1:
            return found[self.shardings[0]]
        next_of, places = dict.fromkeys(found, 0), []
        for home, count in zip(self._homes, self._lengths, strict=True):
            places.append((home, next_of[home], next_of[home] + count))
            next_of[home] += count
        many = len(next(iter(found.values())))
        return [joined(xp, [found[home][i][start:end] for home, start, end in places]) for i in range(many)]

    def sharding_at(self, place: int) -> Sharding:
        number = next(number for number, end in enumerate(self._ends) if place < end)
        return self._homes[number]


class _AnyWay:
    """Norms of groups of gradients, each of which may be split in several ways; then no exact check is safe.

    A process that lacks a replicated gradient finds a different norm.
    """

    def __init__(self, layout: Groups, shardings: Shardings) -> None:
        self._layout, self.shardings = layout, shardings.all
        self._numbers, self._uncounted = shardings.of_gradients, shardings.uncounted()
        self.of_one = len(self.shardings)

    def filled(self, backend: Backend, held: Held, order: Order) -> tuple[Vectors, Any]:
        arrays, layout = held.arrays, self._layout
        precise = arrays.as_precise_as(["float64"])
        numbers = self._numbers or [0] * len(arrays)
        found: Vectors = {}
        every = []
        for number, sharding in enumerate(self.shardings):
            groups = [[index for index in group if numbers[index] == number] for group in layout.groups]
            some = backend.chosen(precise, [index for group in groups for index in group])
            found[sharding], finite = filled_each(backend, Held(some, Groups.consecutive(groups)), order)
            every.append(finite)
        if self._uncounted:
            copies = backend.chosen(precise, self._uncounted)
            every.append(filled_each(backend, Held(copies, Groups.consecutive([self._uncounted])), order)[1])
        return found, backend.xp.all(backend.xp.stack(every))

    def joined(self, xp: ModuleType, found: Vectors, order: Order) -> list[Any]:
        merge = xp.maximum if order.extreme else xp.add
        first, *others = found.values()
        for other in others:
            first = list(map(merge, first, other))
        return first

    def sharding_at(self, place: int) -> Sharding | None:
        return self.shardings[0] if len(self.shardings) == 1 else None


_Shares = _OneWay | _AnyWay


def _equal_parts(vector: Sequence[Any], count: int) -> list[Any]:
    size = len(vector) // count
    return [vector[start:end] for start, end in pairwise(range(0, len(vector) + 1, size))] if size else [vector] * count


def _elements(backend: Backend, part: Held, place: int) -> Any:
    """Return the elements of one norm: arrays of a group, or a unit of an array."""
    arrays, layout = part
    if isinstance(layout, Groups):
        return backend.chosen(arrays, layout.groups[place])
    number = int(layout.array_of[place])
    units, chosen = layout.units[number], backend.chosen(arrays, [number])
    at = _unravelled(place - layout.places(number).start, units.norms_shape)
    (x,) = chosen
    index = tuple(at[units.own.index(axis)] if axis in units.own else slice(None) for axis in range(len(x.shape)))
    return exact.part_of(chosen, index)


def _unravelled(place: int, shape: Sequence[int]) -> list[int]:
    found = []
    for count in reversed(shape):
        place, last = divmod(place, count)
        found.append(last)
    return found[::-1]
