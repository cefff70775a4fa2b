"""The norm of gradients that are split over processes, with the same few collectives on each of them.

The gradients that are split over the same groups of processes share one vector (`shards`), and the vectors are reduced
over one group after the other (`splits`).

Three numbers travel along: how many vectors are added up, which bounds the rounding, and inf where a process holds what
is not finite, be it in a replica that no other counts; how many processes hold float64; how many could not prepare
their gradients, so that a mistake on one ends the call on all.
"""

import math
import operator
from collections.abc import Iterator, Sequence
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
from gradclip.splits import Splits


class Sharing:
    """What one call has to know of the processes that hold parts of its gradients."""

    def __init__(self, members: Members, named: Sequence[Any], order: Order, nonfinite: str) -> None:
        self._module = distributed()
        self._order = shards.check_order(order)
        self._nonfinite = nonfinite
        self._splits = Splits(members, named)
        self._device = self._module.device_for(self._splits.groups, members.parameters)
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

    # The norm

    def norm(self, backend: Backend, arrays: Arrays) -> Norm:
        """Return the norm of what all processes hold, of which this one has `arrays`."""
        shards.check_wide(backend)
        xp = backend.xp
        divided = self._splits.divided(backend, arrays)
        norms = [measure(backend, some, self._order) for some in divided]
        vectors = [self._vector(xp, norm, some) for norm, some in zip(norms, divided, strict=True)]
        (holders, wide, failed), total = self._reduced(xp, _flags(backend, arrays, norms), vectors)
        if self._looks:
            self._check_all_prepared(failed)
        self._holds_float64 = bool(wide > 0) if backend.concrete else FLOAT64 in arrays.formats
        finite = xp.isfinite(holders)
        norm = shards.norm_of(backend, total, self._order, xp.where(finite, holders, 1.0))
        known = (failed == 0) & (finite | ~xp.isfinite(norm.value))
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
        return self.on_host or self._nonfinite == "raise"

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
        return shards.vector(xp, norm, self._order, empty=not some.elements())

    def _reduced(self, xp: Any, flags: list[Any], vectors: Sequence[list[Any]]) -> tuple[list[Any], list[Any]]:
        """Reduce the vectors of all splits to one, and the flags with them, on the device of the processes."""
        largest = self._order.extreme
        reduce = partial(self._module.reduce, device=self._device, largest=largest)
        return self._splits.reduced(flags, vectors, xp.maximum if largest else xp.add, reduce)

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
        nothing = HOST.enter([])
        vector = self._vector(HOST.xp, measure(HOST, nothing, self._order), nothing)
        vectors = [vector] * len(self._splits)
        again = self._nonfinite == "zero" and not self._looks
        for _ in range(1 + again):
            self._reduced(HOST.xp, [np.float64(0), np.float64(0), np.float64(1)], vectors)
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
        return list(self._module.exchange(own, self._splits.groups))


def _flags(backend: Backend, arrays: Arrays, norms: Sequence[Norm]) -> list[Any]:
    """Return the three numbers of this process, which has measured these norms."""
    numbers = [float(len(norms)), float(FLOAT64 in arrays.formats), 0.0]
    holders, wide, failed = (backend.scalar(number, arrays) for number in numbers)
    finite = backend.xp.all(backend.xp.isfinite(backend.xp.stack([norm.value for norm in norms])))
    return [backend.xp.where(finite, holders, math.inf), wide, failed]
