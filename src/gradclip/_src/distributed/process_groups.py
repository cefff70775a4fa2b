"""Norms of gradients sharded over PyTorch processes, with as few collectives as possible.

Gradients sharded over the same process groups share accumulators, which are reduced over one group after another (see
`shardings`). Every process makes the same collective calls.

Four extra numbers (flags) travel with the accumulators:
- the number of norms added up, which bounds the rounding error; inf if any process holds a non-finite element, even in
  a replica that the norm does not count. A process without gradients adds 2**-20, so less than 1 says that none has
  any. One where `where=` chooses none adds nothing, so 0 says that all do;
- the number of processes that hold float64;
- the number of processes that failed to prepare their gradients, so that an error on one process ends the call on all,
  times 2**20, plus the number of those that ask for the norm of each gradient, for a monitor;
- how often the members of a group passed different arguments.

Next to the flags are digests of each process's arguments and of gradients that may be identical on all processes
(`agreement`).
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from gradclip._src.annotations import Threshold
from gradclip._src.backends.host import exact
from gradclip._src.backends.host.backend import HOST
from gradclip._src.backends.torch.distributed import device_for, nothing, nothing_like
from gradclip._src.backends.torch.process_groups import (
    ROOM,
    ROOM_FOR_EACH,
    Group,
    add_up,
    check_known,
    check_named,
    cut,
    exchange,
    gathered,
    groups,
    rank,
    reduce,
)
from gradclip._src.core import accumulators
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import FLOAT64
from gradclip._src.core.holders import Check, Held, Holders, Together
from gradclip._src.core.layouts import Groups
from gradclip._src.core.nonfinite import PROPAGATE, Nonfinite, explained, nonfinite_leaves
from gradclip._src.core.norms import Norm, Order
from gradclip._src.core.pipeline import EachNorm
from gradclip._src.core.protocols import Backend, is_concrete
from gradclip._src.core.values import Array
from gradclip._src.distributed.agreement import Asked, Replicas, asked, marks, raise_problem, replicas_explained
from gradclip._src.distributed.many_norms import ManyNorms
from gradclip._src.distributed.sent import Attempts, filled, flags
from gradclip._src.distributed.shardings import Shardings, check_shows_units
from gradclip._src.passed.parameters import ParameterList
from gradclip._src.passed.unit_axes import check_shown


def filled_up(params: ParameterList, nothing: Callable[[Any], Any]) -> ParameterList:
    """Return parameters with an array without elements in the place of each gradient that is missing here.

    `nothing` returns that array for a parameter.
    """
    lacking = [index for index, grad in enumerate(params.gradients) if grad is None]
    if not lacking or params.tree is not None:
        return params
    params.check_all_hold()
    params.check_no_engine_holds(some_lack=True)
    parameters = {id(params.parameters[index]): params.parameters[index] for index in lacking}
    made = {key: nothing(parameter) for key, parameter in parameters.items()}
    every = zip(params.parameters, params.gradients, strict=True)
    return params.with_gradients([made.get(id(p)) if grad is None else grad for p, grad in every])


class Watching:
    """What takes the norm of each gradient on this process, if anything.

    The norms need one more reduction, in which all processes take part as soon as one of them asks for the norms: a
    monitor may be on one process only. They are measured once, before the gradients are scaled. `nothing` is as in
    `filled_up`.
    """

    def __init__(self, params: ParameterList, each: EachNorm | None, nothing: Callable[[Any], Any]) -> None:
        self._params, self._each, self._nothing = params, each, nothing
        self._asks = True

    def asking(self, order: Order) -> float:
        """Return 1 if this process asks for the norms, else 0."""
        return float(self._asks and self._each is not None and self._each.wants(order))

    def measure(self, backend: Backend, arrays: Arrays, order: Order, together: Together) -> None:
        """Measure the norms together with the other processes. `arrays` are the gradients of this process."""
        self._asks = False
        params = self._params
        first = {id(p): number for number, p in reversed(list(enumerate(params.parameters)))}
        numbers = sorted(first.values())
        lacking = [params.gradients[number] is None for number in numbers]
        if any(lacking):
            own, every = iter(arrays.sources), filled_up(params, self._nothing).gradients
            each = zip(numbers, lacking, strict=True)
            arrays = backend.enter([every[number] if lacks else next(own) for number, lacks in each])
        (norm,) = together.measure_parts(backend, [Held(arrays, Groups.each_alone(len(numbers)))], order)
        if self._each is not None:
            values = norm.product()
            # A gradient that no process has is no layer.
            some = [i for i, lacks in enumerate(lacking) if not lacks or values[i] != 0]
            self._each.put(values[some], [params.name(numbers[i]) for i in some])


_NORMS, _FLOAT64, _FAILED, _DIFFER = range(4)
"""The indices of the flags."""

_ONE_FAILED = 2.0**20
_LACKS = 2.0**-20


class ProcessGroups(Holders):
    """The processes that hold shards of the gradients of one call. All of them must make the call."""

    unseen_dtypes = True

    def __init__(self, params: ParameterList, named: Sequence[Any], *, each: bool = False) -> None:
        """Find the processes. `each`: the call measures many norms, so that its first reduction is longer."""
        check_known(named)
        self._named = [*named, *params.named]
        self._params, self._shardings = params, Shardings(params, named)
        self._device = device_for(self._shardings.groups, params.parameters)
        self._holds_float64 = False
        self._asked: Asked = ()
        self._problem = ""
        self._waits = False
        self._order, self._nonfinite = Order(2.0), PROPAGATE
        self._replicas = Replicas(groups(self._named), self._shardings)
        self._each = each
        self._watching: Watching | None = None
        self._lacking: ParameterList | None = None
        self._many = ManyNorms(self._shardings, self._reduce_each, self._flags, self._heard, self._look)
        self.together = self._many

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
        max_norm: Threshold | Sequence[Threshold] | None = None,
        *,
        skip_above: float = math.inf,
        scale: Threshold | None = None,
        more: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """Record this process's arguments. Raises ValueError for an order that only one process can measure."""
        self._order, self._nonfinite = accumulators.check_order(order), nonfinite
        self._asked = asked(order.p, nonfinite.name, max_norm, skip_above=skip_above, scale=scale, more=more)

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """On an error or at differing arguments, raise on all processes. Accelerators are waited for."""
        self._waits = True
        with self.preparing():
            yield
        self._check(self._sent_without_gradients(failed=False))

    def anywhere(self, found: bool) -> bool:
        """Return whether any process found something."""
        return any(one for (one,) in exchange([(found,)], self._shardings.groups))

    def nothing(self) -> list[Any]:
        """Return a tensor without elements, for a process that has no gradient."""
        return [nothing(self._device)]

    def lack_gradients(self, params: ParameterList) -> None:
        """Warn once no process is known to have one. Without waiting, warn only where others cannot have any."""
        if self.on_host:
            self._lacking = params
        elif not self._named:  # all processes have gradients of distributed tensors, or none
            params.warn_of_no_gradient()

    def filled(self, params: ParameterList, shape: Callable[[Any], Sequence[int]]) -> ParameterList:
        """Return the parameters, with a tensor without elements in the place of each gradient missing here."""
        if params.tree is None and all(grad is None for grad in params.gradients):
            self.lack_gradients(params)
        return filled_up(params, partial(nothing_like, shape=shape, device=self._device))

    def check_units(self) -> None:
        """Raise a ValueError for shards of FSDP1: they are flat, so that rows cannot be told apart."""
        check_shows_units(self._params)

    def check_shown(self, gradients: Sequence[Any], names: Callable[[], Sequence[str]]) -> None:
        """Raise a ValueError for a gradient whose shape on this process does not show the units of the whole."""
        if self._named:
            check_shown(gradients, names, "process_group and mesh", holder="process")

    def watched(self, each: EachNorm | None) -> EachNorm | None:
        """Take charge of it if every process can: each knows in time whether another asks."""
        if not self._named and self.on_host:
            self._watching = Watching(self._params, each, lambda _: nothing(self._device))
        return None

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
        copies = backend.chosen(arrays, self._shardings.uncounted())
        every = [*norms, backend.norms(copies, order)] if len(copies) else norms
        finite = xp.all(xp.isfinite(xp.stack([norm.value for norm in every])))
        own = self._flags(backend, arrays, len(norms), finite)
        if self._watching is not None:
            own[_FAILED] = own[_FAILED] + self._watching.asking(order)
        reached, total = self._reduced(xp, own, known)
        sure, finite = self._heard(backend, reached), xp.isfinite(reached[_NORMS])
        if self._watching is not None and reached[_FAILED] > 0:
            self._watching.measure(backend, arrays, order, self._many)
        norm = accumulators.norm_of(backend, total, order, xp.where(finite, reached[_NORMS], 1.0))
        sure = sure & (finite | ~xp.isfinite(norm.value))
        return Norm(xp.where(sure, norm.value, math.nan), norm.divisor, norm.error, norm.floor)

    def _flags(self, backend: Backend, arrays: Arrays, norms: int, finite: Array) -> list[Any]:
        """Return the flags of this process, which has measured so many norms."""
        some = norms if self._lacking is None else _LACKS
        return flags(backend, arrays, 0.0 if self._params.unmatched else some, finite)

    def _look(self, backend: Backend, arrays: Arrays) -> None:
        """Look at the gradients of named groups, which may be the same on all processes."""
        if self._named and self.on_host and backend.concrete:
            divided = self._shardings.divided(backend, arrays)
            self._replicas.look([backend.norms(some, self._order) for some in divided], divided)

    def _heard(self, backend: Backend, flags: Sequence[Any]) -> Any:
        """Return whether nothing is wrong on any process (see `_check`); raise if this process can see what is."""
        failed, differ = flags[_FAILED] >= _ONE_FAILED, flags[_DIFFER]
        self._holds_float64 = backend.concrete and bool(flags[_FLOAT64] > 0)
        if self._looks:
            self._check(flags)
        params, self._lacking = self._lacking, None
        if params is not None and backend.concrete and not params.unmatched and flags[_NORMS] < 1:
            params.warn_of_no_gradient()
        agreed = failed + differ == 0
        return agreed & (flags[_NORMS] > 0) if self._params.unmatched else agreed

    def norm_dtype(self, arrays: Arrays) -> str:
        """Return the dtype of the norm: float64 if any process holds float64 (on devices: if this one does)."""
        return "float64" if self._holds_float64 or FLOAT64 in arrays.formats else "float32"

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
        arrays = backend.chosen(arrays, self._shardings.counting(range(len(arrays))))
        attempts = Attempts()
        powers = attempts.of(lambda: exact.power_sum(backend, arrays, p)) if is_concrete(backend) else math.nan
        _, (total,) = self._shardings.reduced([], [[powers]], operator.add, add_up)
        attempts.check([total])
        return isinstance(total, Fraction) and total <= Fraction(max_norm) ** int(p)

    def _reduced(self, xp: ModuleType, flags: list[Any], known: Sequence[list[Any]]) -> tuple[list[Any], list[Any]]:
        """Reduce the flags and the accumulators of all shardings on the processes' devices."""
        merge = xp.maximum if self._order.extreme else xp.add
        return self._shardings.reduced(flags, known, merge, lambda *values: list(self._reduce(*values)))

    def _reduce_each(self, values: list[Any], group: Group, lengths: tuple[int, ...]) -> Any:
        return self._reduce(values, group, lengths, ROOM_FOR_EACH)

    def _reduce(self, values: list[Any], group: Group, lengths: tuple[int, ...], room: int = ROOM) -> Any:
        """Reduce values over one group, and record in the flags whether its members passed the same arguments."""
        largest = self._order.extreme
        wanted = marks((self._asked, lengths), len(group.ranks), largest=largest)
        held = self._replicas.marks(group, largest=largest)
        reduced, same = reduce(values, group, self._device, [*wanted, *held], largest=largest, room=room)
        reduced[_DIFFER] = reduced[_DIFFER] + ~(same[0] & same[1])
        if held[0] and same[2] and same[3] and self._are_replicas(group):
            self._problem = replicas_explained(group)
            reduced[_FAILED] = reduced[_FAILED] + _ONE_FAILED
        return reduced

    def _are_replicas(self, group: Group) -> bool:
        digests = set(gathered(self._replicas.digest(group), group))
        return len(digests) == 1 and None not in digests

    # Errors that end the call on every process

    def _tell(self, error: Exception) -> None:
        if not self._waits:
            self._params.take_part_in_sums()
        differ = self._sent_without_gradients(failed=True)[_DIFFER]
        self._problem = f"{type(error).__name__}: {error}"
        if self._all_look or (self._looks and differ == 0):
            self._told()

    def _sent_without_gradients(self, *, failed: bool) -> list[Array]:
        """Take part in the reductions of a call without gradients; return the flags."""
        own = [np.float64(number) for number in (not self._params.unmatched, 0, failed * _ONE_FAILED, 0)]
        if self._each:
            reached, _ = self._shardings.reduced_each(own, {}, self._reduce_each, cut)
        else:
            empty = HOST.enter([])
            known = [filled(HOST.xp, HOST.norms(empty, self._order), self._order, empty)] * len(self._shardings)
            reached, _ = self._reduced(HOST.xp, own, known)
        return reached

    def _check(self, flags: Sequence[Any]) -> None:
        """Raise if a process failed, if arguments differ, or if `where=` chooses nothing on any process."""
        self._check_all_agree(flags[_FAILED] >= _ONE_FAILED, flags[_DIFFER])
        if self._params.unmatched and not flags[_NORMS] > 0:
            raise ValueError(
                f"where chooses nothing on any process. On this one, rank {rank()}: {self._params.unmatched} Nothing "
                "has been changed."
            )

    def _check_all_agree(self, failed: Array, differ: Array) -> None:
        """Raise if a process failed to prepare its gradients or passed different arguments."""
        if failed + differ == 0:
            return
        # On accelerators the differing argument may be `nonfinite`. Then not every process looks at the flags and joins
        # the exchange, so there is none.
        told = self._told() if self._all_look or differ == 0 else []
        if self._problem:
            raise ValueError(self._problem)
        raise_problem(told)

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
