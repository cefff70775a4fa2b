"""The norm of gradients that are split over processes, with the same few collectives on each of them.

The gradients that are split over the same groups of processes share one vector (`shards`), and the vectors are reduced
over one group after the other (`splits`).

Four numbers travel along: how many vectors are added up, which bounds the rounding, and inf where a process holds what
is not finite, be it in a replica that no other counts; how many processes hold float64; how many could not prepare
their gradients, so that a mistake on one ends the call on all; how often processes of a group did not ask for the same.
Beside them stand marks of what each asks for (`agreement`), and of gradients that may be the same on all (`replicas`).
"""

import math
import operator
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from gradclip import exact, replicas, shards
from gradclip.agreement import Asked, asked, differences, marks
from gradclip.backends import Backend, among_several, any_distributed, distributed
from gradclip.backends.arrays import Arrays
from gradclip.backends.formats import FLOAT64
from gradclip.backends.numpy import HOST
from gradclip.members import UNNAMED, Members, as_tuple
from gradclip.norms import Norm, Order, measure
from gradclip.policy import PROPAGATE, Nonfinite, explained, nonfinite_leaves
from gradclip.replicas import Replicas
from gradclip.splits import Splits
from gradclip.tree import listed

_FAILED, _DIFFER = 2, 3
"""The places of two flags."""


class Sharing:
    """What one call has to know of the processes that hold parts of its gradients."""

    def __init__(self, members: Members, named: Sequence[Any]) -> None:
        self._module = distributed()
        self._named = [*named, *(one for beside in members.beside if beside is not UNNAMED for one in beside)]
        self._splits = Splits(members, named)
        self._device = self._module.device_for(self._splits.groups, members.parameters)
        self._holds_float64 = False
        self._asked: Asked = ()
        self._problem = ""
        self._order, self._nonfinite = Order(2.0), PROPAGATE
        self._replicas = Replicas(self._module.groups(self._named), self._splits)

    @classmethod
    def of(cls, members: Members, process_group: Any, mesh: Any) -> "Sharing | None":
        """Return it, or None where all gradients belong to this process alone."""
        named = (*as_tuple(process_group), *as_tuple(mesh))
        if process_group is None and mesh is None and among_several():
            check_unsaid(members)
        alone = not named and all(beside is UNNAMED for beside in members.beside)
        if alone and not any_distributed(members.parameters) and not any_distributed(members.gradients):
            return None
        distributed().check_known(named)
        return cls(members, named)

    def ask(self, order: Order, nonfinite: Nonfinite, max_norm: Any = None) -> None:
        """Take note of what this process asks for. Raises ValueError for an order that cannot be shared."""
        self._order, self._nonfinite = shards.check_order(order), nonfinite
        self._asked = asked(order.p, nonfinite.name, max_norm)

    # The norm

    def norm(self, backend: Backend, arrays: Arrays) -> Norm:
        """Return the norm of what all processes hold, of which this one has `arrays`."""
        shards.check_wide(backend)
        xp = backend.xp
        divided = self._splits.divided(backend, arrays)
        norms = [measure(backend, some, self._order) for some in divided]
        if self.on_host and backend.concrete:
            self._replicas.look(norms, divided)
        vectors = [self._vector(xp, norm, some) for norm, some in zip(norms, divided, strict=True)]
        (holders, wide, failed, differ), total = self._reduced(xp, _flags(backend, arrays, norms), vectors)
        if self._looks:
            self._check_all_agree(failed, differ)
        self._holds_float64 = bool(wide > 0) if backend.concrete else FLOAT64 in arrays.formats
        finite = xp.isfinite(holders)
        norm = shards.norm_of(backend, total, self._order, xp.where(finite, holders, 1.0))
        known = (failed + differ == 0) & (finite | ~xp.isfinite(norm.value))
        return Norm(xp.where(known, norm.value, math.nan), norm.divisor, norm.error, norm.floor)

    def keep(self, indices: Sequence[int]) -> None:
        """Forget the gradients of this process of which the index is none of these."""
        self._splits.keep(indices)

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

    @property
    def _looks(self) -> bool:
        return self.on_host or self._nonfinite.raises

    @property
    def decides(self) -> bool:
        """Whether the processes may ask `fits`, which takes all of them, because of the norm.

        They may where the norm is sure to be the same for all: where every gradient is split over the same groups. A
        gradient that each should hold may lack on one of them, which then finds another norm.
        """
        return self.on_host and len(self._splits) == 1

    def fits(self, backend: Backend, arrays: Arrays, max_norm: float) -> bool:
        """Say in exact arithmetic whether the norm of what all processes hold is at most `max_norm`.

        False also where that cannot be told.
        """
        powers = [[self._power_sum(backend, arrays)]]
        _, (total,) = self._splits.reduced([], powers, operator.add, self._module.add_up)
        return isinstance(total, Fraction) and total <= Fraction(max_norm) ** int(self._order.p)

    def _power_sum(self, backend: Backend, arrays: Arrays) -> Fraction | float:
        return exact.power_sum(backend, arrays, self._order.p) if backend.concrete else math.nan

    def _vector(self, xp: Any, norm: Norm, some: Arrays) -> list[Any]:
        if norm.floor:  # of which the others are told nothing else
            added = norm.floor if norm.divisor is None else norm.floor / norm.divisor
            norm = replace(norm, value=xp.where(norm.value > 0, norm.value + added, norm.value))
        return shards.vector(xp, norm, self._order, empty=not some.elements())

    def _reduced(self, xp: Any, flags: list[Any], vectors: Sequence[list[Any]]) -> tuple[list[Any], list[Any]]:
        """Reduce the vectors of all splits to one, and the flags with them, on the device of the processes."""
        merge = xp.maximum if self._order.extreme else xp.add
        return self._splits.reduced(flags, vectors, merge, self._reduce)

    def _reduce(self, values: list[Any], group: Any, lengths: tuple[int, ...]) -> list[Any]:
        """Reduce the values of one group, and count in the flags whether its members ask for the same."""
        largest = self._order.extreme
        wanted = marks((self._asked, lengths), len(group.ranks), largest=largest)
        held = self._replicas.marks(group, largest=largest)
        reduced, same = self._module.reduce(values, group, self._device, [*wanted, *held], largest=largest)
        reduced[_DIFFER] = reduced[_DIFFER] + ~(same[0] & same[1])
        if held[0] and same[2] and same[3] and self._are_replicas(group):
            self._problem = replicas.explained(group)
            reduced[_FAILED] = reduced[_FAILED] + 1.0
        return reduced

    def _are_replicas(self, group: Any) -> bool:
        digests = set(self._module.gathered(self._replicas.digest(group), group))
        return len(digests) == 1 and None not in digests

    # Errors, which end the call on every process

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Take part in the collectives all the same where an error ends the preparation, and tell the others of it."""
        try:
            self._module.check_named(self._named)
            yield
        except Exception as error:
            self._tell(error)
            raise

    def _tell(self, error: Exception) -> None:
        nothing = HOST.enter([])
        vector = self._vector(HOST.xp, measure(HOST, nothing, self._order), nothing)
        vectors = [vector] * len(self._splits)
        again = self._nonfinite.zeroes and not self._looks
        for _ in range(1 + again):
            flags, _ = self._reduced(HOST.xp, [np.float64(number) for number in (0, 0, 1, 0)], vectors)
        self._problem = f"{type(error).__name__}: {error}"
        if self.on_host or (self._looks and flags[_DIFFER] == 0):
            self._told()

    def _check_all_agree(self, failed: Any, differ: Any) -> None:
        """Raise where a process could not prepare its gradients, or asks for something else than the others."""
        if failed + differ == 0:
            return
        # On accelerators it may be the policy that differs, and then not all of them look, and exchange anything.
        told = self._told() if self.on_host or differ == 0 else []
        if self._problem:
            raise ValueError(self._problem)
        problems = [f"rank {rank}: {problem}" for rank, _, _, problem in told if problem]
        if problems:
            raise RuntimeError(
                "another process could not prepare its gradients, so that there is no norm of all: "
                f"{listed(problems, '; ')} Nothing has been changed."
            )
        where = differences(one[:3] for one in told) if told else "max_norm, ord, nonfinite or process groups differ"
        raise ValueError(
            f"the processes do not ask for the same: {where}. Call with the same arguments and the same process groups "
            "in all of them. Nothing has been changed."
        )

    def _told(self) -> list[Any]:
        """Return the rank of each process, what it asks for, over which groups, and what is wrong there."""
        own = (self._module.rank(), self._asked, self._splits.described(), self._problem)
        return list(self._module.exchange([own], self._splits.groups))

    def raise_nonfinite(self, backend: Backend, arrays: Arrays, names: Sequence[str]) -> None:
        """Raise a FloatingPointError that names each process and gradient which holds NaN or infinities."""
        leaves = nonfinite_leaves(backend, arrays, names)
        own = [f"rank {self._module.rank()}: {leaf}" for leaf in leaves]
        found = self._module.exchange(own, self._splits.groups)
        raise FloatingPointError(explained(f"in {len(found)} leaves", found))


def check_unsaid(members: Members) -> None:
    """Look for parameters that are parts of others, or lack, though nothing says who holds the rest.

    Raises ValueError for shards of FSDP1; warns of an empty list in one of several processes.
    """
    if not members.parameters and members.tree is None:
        warnings.warn(
            f"this process, rank {distributed().rank()}, passes no parameters: its norm is 0, and processes that hold "
            "distributed tensors wait for it. Pass parameters without gradients, too, or process_group=; [] says that "
            "this process is alone.",
            RuntimeWarning,
            stacklevel=4,
        )
    unsaid = [p for p, beside in zip(members.parameters, members.beside_each(), strict=True) if beside is UNNAMED]
    at = distributed().fsdp1_shard(unsaid)
    if at is not None:
        raise ValueError(
            "the parameters belong to FullyShardedDataParallel (FSDP1), which gives each process a shard of them, and "
            "nothing says which processes hold the others. Pass process_group=model.process_group, of the FSDP module. "
            "Under NO_SHARD, where every process holds all, pass process_group=[]."
        )


def _flags(backend: Backend, arrays: Arrays, norms: Sequence[Norm]) -> list[Any]:
    """Return the four numbers of this process, which has measured these norms."""
    numbers = [float(len(norms)), float(FLOAT64 in arrays.formats), 0.0, 0.0]
    holders, *others = (backend.scalar(number, arrays) for number in numbers)
    finite = backend.xp.all(backend.xp.isfinite(backend.xp.stack([norm.value for norm in norms])))
    return [backend.xp.where(finite, holders, math.inf), *others]
