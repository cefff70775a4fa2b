"""Norms of gradients sharded over PyTorch processes, with as few collectives as possible.

Gradients sharded over the same process groups share accumulators, which are reduced over one group after another (see
`shardings`). Every process makes the same collective calls.

Four extra numbers (flags) travel with the accumulators:
- the number of norms added up, which bounds the rounding error; inf if any process holds a non-finite element, even in
  a replica that the norm does not count;
- the number of processes that hold float64;
- the number of processes that failed to prepare their gradients, so that an error on one process ends the call on all;
- how often the members of a group passed different arguments.

Next to the flags are digests of each process's arguments and of gradients that may be identical on all processes
(`agreement`).
"""

import math
import operator
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from gradclip.backends.host import exact
from gradclip.backends.host.backend import HOST
from gradclip.backends.host.protocol import in_host_memory
from gradclip.backends.torch.distributed import device_for, fsdp1_shard, nothing
from gradclip.backends.torch.process_groups import (
    Group,
    add_up,
    check_known,
    check_named,
    exchange,
    gathered,
    groups,
    rank,
    reduce,
)
from gradclip.core import accumulators
from gradclip.core.arrays import Arrays
from gradclip.core.formats import FLOAT64
from gradclip.core.holders import Check, Holders
from gradclip.core.nonfinite import PROPAGATE, Nonfinite, explained, nonfinite_leaves
from gradclip.core.norms import Norm, Order
from gradclip.core.protocols import Backend
from gradclip.core.values import Array
from gradclip.distributed.agreement import Asked, Replicas, asked, differences, marks, replicas_explained
from gradclip.distributed.shardings import Shardings
from gradclip.parameters import UNNAMED, ParameterList
from gradclip.typing import Threshold
from gradclip.words import listed

_FAILED, _DIFFER = 2, 3
"""The indices of two of the flags."""


class ProcessGroups(Holders):
    """The processes that hold shards of the gradients of one call. All of them must make the call."""

    unseen_dtypes = True

    def __init__(self, params: ParameterList, named: Sequence[Any]) -> None:
        check_known(named)
        self._named = [*named, *(one for beside in params.beside if beside is not UNNAMED for one in beside)]
        self._params, self._shardings = params, Shardings(params, named)
        self._device = device_for(self._shardings.groups, params.parameters)
        self._holds_float64 = False
        self._asked: Asked = ()
        self._problem = ""
        self._waits = False
        self._order, self._nonfinite = Order(2.0), PROPAGATE
        self._replicas = Replicas(groups(self._named), self._shardings)

    # The call

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """On an error during preparation, still take part in the collectives and tell the other processes."""
        try:
            check_named(self._named)
            self._shardings.check_orders()
            yield
        except Exception as error:
            self._tell(error)
            raise

    def ask(
        self,
        order: Order,
        nonfinite: Nonfinite,
        max_norm: Threshold | None = None,
        *,
        skip_above: float = math.inf,
        scale: Threshold | None = None,
    ) -> None:
        """Record this process's arguments. Raises ValueError for an order that only one process can measure."""
        self._order, self._nonfinite = accumulators.check_order(order), nonfinite
        self._asked = asked(order.p, nonfinite.name, max_norm, skip_above=skip_above, scale=scale)

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """On an error or at differing arguments, raise on all processes. Accelerators are waited for."""
        self._waits = True
        with self.preparing():
            yield
        self._check_all_agree(*self._sent_without_gradients(failed=False))

    def anywhere(self, found: bool) -> bool:
        """Return whether any process found something."""
        return any(one for (one,) in exchange([(found,)], self._shardings.groups))

    def nothing(self) -> list[Any]:
        """Return a tensor without elements, for a process that has no gradient."""
        return [nothing(self._device)]

    def holders(self, backend: Backend) -> Holders:
        """Return the holders of the gradients: these same processes."""
        return self

    # The norm

    def measure(self, backend: Backend, arrays: Arrays, order: Order) -> Norm:
        """Return the norm over all processes. `arrays` is what this process holds."""
        accumulators.check_wide(backend)
        xp = backend.xp
        divided = self._shardings.divided(backend, arrays)
        norms = [backend.norms(some, order) for some in divided]
        if self.on_host and backend.concrete:
            self._replicas.look(norms, divided)
        known = [filled(xp, norm, order, some) for norm, some in zip(norms, divided, strict=True)]
        (holders, wide, failed, differ), total = self._reduced(xp, _flags(backend, arrays, norms), known)
        if self._looks:
            self._check_all_agree(failed, differ)
        self._holds_float64 = bool(wide > 0) if backend.concrete else FLOAT64 in arrays.formats
        finite = xp.isfinite(holders)
        norm = accumulators.norm_of(backend, total, order, xp.where(finite, holders, 1.0))
        sure = (failed + differ == 0) & (finite | ~xp.isfinite(norm.value))
        return Norm(xp.where(sure, norm.value, math.nan), norm.divisor, norm.error, norm.floor)

    def norm_dtype(self, arrays: Arrays) -> str:
        """Return the dtype of the norm: float64 if any process holds float64 (on devices: if this one does)."""
        return "float64" if self._holds_float64 else "float32"

    @property
    def on_host(self) -> bool:
        """Whether all processes reduce on the host, so that each can read the result without waiting."""
        return bool(self._device.type == "cpu")

    @property
    def _all_look(self) -> bool:
        return self.on_host or self._waits

    @property
    def _looks(self) -> bool:
        return self._all_look or self._nonfinite.raises

    def exact_check(self, backend: Backend) -> Check | None:
        """Return the exact check of the norm, or None if it is not safe. The check needs all processes.

        It is safe only if every gradient is sharded over the same groups. Only then do all processes find the same
        norm, and so agree on whether to check. A process that lacks a replicated gradient finds a different norm.
        """
        return partial(self._at_most, backend) if self.on_host and len(self._shardings) == 1 else None

    def _at_most(self, backend: Backend, arrays: Arrays, p: float, max_norm: float) -> bool:
        """Say whether the norm over all processes is at most `max_norm`. False if the exact sum is not available."""
        powers = exact.power_sum(backend, arrays, p) if in_host_memory(backend) else math.nan
        _, (total,) = self._shardings.reduced([], [[powers]], operator.add, add_up)
        return isinstance(total, Fraction) and total <= Fraction(max_norm) ** int(p)

    def _reduced(self, xp: ModuleType, flags: list[Any], known: Sequence[list[Any]]) -> tuple[list[Any], list[Any]]:
        """Reduce the flags and the accumulators of all shardings on the processes' devices."""
        merge = xp.maximum if self._order.extreme else xp.add
        return self._shardings.reduced(flags, known, merge, self._reduce)

    def _reduce(self, values: list[Any], group: Group, lengths: tuple[int, ...]) -> list[Any]:
        """Reduce values over one group, and record in the flags whether its members passed the same arguments."""
        largest = self._order.extreme
        wanted = marks((self._asked, lengths), len(group.ranks), largest=largest)
        held = self._replicas.marks(group, largest=largest)
        reduced, same = reduce(values, group, self._device, [*wanted, *held], largest=largest)
        reduced[_DIFFER] = reduced[_DIFFER] + ~(same[0] & same[1])
        if held[0] and same[2] and same[3] and self._are_replicas(group):
            self._problem = replicas_explained(group)
            reduced[_FAILED] = reduced[_FAILED] + 1.0
        return reduced

    def _are_replicas(self, group: Group) -> bool:
        digests = set(gathered(self._replicas.digest(group), group))
        return len(digests) == 1 and None not in digests

    # Errors that end the call on every process

    def _tell(self, error: Exception) -> None:
        if not self._waits:
            self._params.take_part_in_sums()
        _, differ = self._sent_without_gradients(failed=True)
        self._problem = f"{type(error).__name__}: {error}"
        if self._all_look or (self._looks and differ == 0):
            self._told()

    def _sent_without_gradients(self, *, failed: bool) -> tuple[Array, Array]:
        """Take part in the reductions of a call without gradients; return how many failed, and how many differ."""
        empty = HOST.enter([])
        known = [filled(HOST.xp, HOST.norms(empty, self._order), self._order, empty)] * len(self._shardings)
        flags, _ = self._reduced(HOST.xp, [np.float64(number) for number in (0, 0, failed, 0)], known)
        return flags[_FAILED], flags[_DIFFER]

    def _check_all_agree(self, failed: Array, differ: Array) -> None:
        """Raise if a process failed to prepare its gradients or passed different arguments."""
        if failed + differ == 0:
            return
        # On accelerators the differing argument may be `nonfinite`. Then not every process looks at the flags and joins
        # the exchange, so there is none.
        told = self._told() if self._all_look or differ == 0 else []
        if self._problem:
            raise ValueError(self._problem)
        problems = [f"rank {rank}: {problem}" for rank, _, _, problem in told if problem]
        if problems:
            raise RuntimeError(
                "the call failed on another process, so the norm over all processes is unknown: "
                f"{listed(problems, '; ')} Nothing has been changed."
            )
        where = differences(one[:3] for one in told) if told else "max_norm, ord, nonfinite or process groups differ"
        raise ValueError(
            f"the processes passed different arguments: {where}. Pass the same arguments and process groups in every "
            "process. Nothing has been changed."
        )

    def _told(self) -> list[Any]:
        """Return each process's rank, arguments, process groups and error message."""
        own = (rank(), self._asked, self._shardings.described(), self._problem)
        return exchange([own], self._shardings.groups)

    def raise_nonfinite(self, backend: Backend, arrays: Arrays, names: Sequence[str]) -> None:
        """Raise a FloatingPointError that names every process and gradient with NaN or infinities."""
        leaves = nonfinite_leaves(backend, arrays, names)
        own = [f"rank {rank()}: {leaf}" for leaf in leaves]
        found = exchange(own, self._shardings.groups)
        raise FloatingPointError(explained(f"in {len(found)} {'leaf' if len(found) == 1 else 'leaves'}", found))


def check_unsaid(params: ParameterList) -> None:
    """Check for sharded or missing parameters when no argument names the processes that hold the rest.

    Raises ValueError for FSDP1 shards. Warns if one of several processes passes an empty list.
    """
    if not params.parameters and params.tree is None:
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


def filled(xp: ModuleType, norm: Norm, order: Order, arrays: Arrays) -> list[Any]:
    """Return the accumulators that this process sends, computed from `norm`, the norm of `arrays`."""
    if norm.floor:  # added here, because the accumulators have no place for the floor
        added = norm.floor if norm.divisor is None else norm.floor / norm.divisor
        norm = replace(norm, value=xp.where(norm.value > 0, norm.value + added, norm.value))
    return accumulators.filled(xp, norm, order, empty=not arrays.elements())


def _flags(backend: Backend, arrays: Arrays, norms: Sequence[Norm]) -> list[Any]:
    """Return this process's four flags, given the norms that it measured."""
    numbers = [float(len(norms)), float(FLOAT64 in arrays.formats), 0.0, 0.0]
    holders, *others = (backend.scalar(number, arrays) for number in numbers)
    finite = backend.xp.all(backend.xp.isfinite(backend.xp.stack([norm.value for norm in norms])))
    return [backend.xp.where(finite, holders, math.inf), *others]
