"""Who makes a call together: the processes of a call in place, usually one, or the devices of a mesh of JAX.

Norms of JAX arrays sharded over the devices of a mesh are each computed with one reduction. `MeshAxes` is for code that
runs on each device's own shards, with named mesh axes (`jax.shard_map`). `ExplicitMesh` is for code on whole arrays
whose sharding JAX knows. It runs the measurement on each device.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gradclip._src.annotations import AxisName, Meshes, Parameters, ProcessGroups, Threshold
from gradclip._src.backends import among_several, any_distributed
from gradclip._src.core import accumulators
from gradclip._src.core.accumulators import LARGEST_ORDER, check_order
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.holders import ALONE, Holders
from gradclip._src.core.layouts import TREE, Groups, Scope
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Norm, Order
from gradclip._src.core.pipeline import EachNorm
from gradclip._src.core.protocols import Axes, Backend
from gradclip._src.passed.parameters import UNNAMED, ParameterList, as_tuple


@dataclass(frozen=True)
class MeshAxes(Holders):
    """The devices along mesh axes, for code that runs on each device's own shards (`jax.shard_map`)."""

    axes: Axes

    def measure(self, backend: Backend, arrays: Arrays, order: Order) -> Norm:
        """Return the norm of all shards. Raises ValueError if the order is too high."""
        count = arrays.elements()
        norm = self.reduced(backend, arrays, check_order(order))
        return replace(norm, floor=backend.floor(arrays, count * self.axes.count(), order)) if count else norm

    def measure_units(self, backend: Backend, arrays: Arrays, order: Order, scope: Scope) -> Norm:
        """Return each norm of a scope, of whose elements each device has some. Raises likewise."""
        count = arrays.elements()
        norm = self.reduced(backend, arrays, check_order(order), scope)
        return replace(norm, floor=backend.floor(arrays, count * self.axes.count(), order)) if count else norm

    def reduced(self, backend: Backend, arrays: Arrays, order: Order, scope: Scope = TREE) -> Norm:
        """Return the norm, or each of a scope, without its floor, with one reduction over the axes."""
        groups = [group.as_precise_as(arrays.dtypes) for group in self.axes.groups(arrays)]
        parts = [backend.norms(group, order, scope) for group in groups]
        if not parts:
            return backend.norms(arrays, order, scope)
        known = [
            accumulators.filled(backend.xp, norm, order, empty=not x.elements())
            for norm, x in zip(parts, groups, strict=True)
        ]
        reduce = self.axes.largest if order.extreme else self.axes.total
        sums = reduce(list(map(backend.xp.stack, known)))
        whole = accumulators.norm_of(backend, sums, order, len(parts) * self.axes.count())
        return replace(whole, error=max(norm.error for norm in parts)) if order.extreme else whole


class ExplicitMesh(Holders):
    """The devices over which JAX shards the arrays of traced code, when the arrays' types show the sharding."""

    sees_all = True  # each array is the whole array, not a shard

    def measure(self, backend: Backend, arrays: Arrays, order: Order) -> Norm:
        """Return the norm. Each device measures its own shards if the layout is known and the order is low enough."""
        count = arrays.elements()
        run = backend.on_each_device(arrays) if order.extreme or order.p <= LARGEST_ORDER else None
        if run is None or not count:
            return backend.norms(arrays, order)

        def compute(local: Backend, axes: Axes, shards: Arrays) -> tuple[Any, Any, Any]:
            norm = MeshAxes(axes).reduced(local, shards, order)
            return norm.value, norm.divisor, backend.scalar(norm.error, shards)

        value, divisor, error = run(compute)
        return Norm(value, divisor, error, backend.floor(arrays, count, order))

    def measure_each(self, backend: Backend, arrays: Arrays, order: Order, layout: Groups) -> Norm:
        """Return the norms as a vector, with a single computation if no layout is known."""
        if all(backend.on_each_device(backend.chosen(arrays, group)) is None for group in layout.groups):
            return backend.norms(arrays, order, layout)
        return super().measure_each(backend, arrays, order, layout)


EXPLICIT_MESH = ExplicitMesh()


def holders_of(backend: Backend) -> Holders:
    """Return who holds a backend's arrays: this process alone, or, in traced code, possibly the devices of a mesh."""
    return ALONE if backend.visible else EXPLICIT_MESH


def over_axes(backend: Backend, axis_name: AxisName) -> tuple[Backend, Holders]:
    """Return the backend for shards over the named mesh axes, and the devices along these axes as holders."""
    local, axes = backend.mesh(axis_name)
    return local, MeshAxes(axes)


class Processes(Protocol):
    """What a call asks of the processes before there are arrays to measure. The answers here are those of one alone."""

    def preparing(self) -> AbstractContextManager[None]:
        """Return a context in which an error ends the call on all processes."""
        return _NOTHING_TO_TELL

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
        """Record this process's arguments, which must be the same on all processes; `more` are others, with names."""

    def agreeing(self) -> AbstractContextManager[None]:
        """Return `preparing` for a call that measures nothing. At its end, differing arguments raise everywhere."""
        return _NOTHING_TO_TELL

    def anywhere(self, found: bool) -> bool:
        """Return whether any process found something. All of them must ask."""
        return found

    def nothing(self) -> Sequence[Any]:
        """Return the arrays to measure for a process without gradients."""
        return ()

    def filled(self, params: ParameterList, shape: Callable[[Any], Sequence[int]]) -> ParameterList:
        """Return the parameters, with something in the place of gradients that only other processes may have."""
        return params

    def lack_gradients(self, params: ParameterList) -> None:
        """Warn that no parameter has a gradient, as soon as no process can have one."""
        params.warn_of_no_gradient()

    def check_units(self) -> None:
        """Raise a ValueError if gradients are held in a form that does not show their units."""
        return

    def check_shown(self, gradients: Sequence[Any], names: Callable[[], Sequence[str]]) -> None:
        """Raise a ValueError for a gradient whose shape on this process does not show the units of the whole."""
        return

    def watched(self, each: EachNorm | None) -> EachNorm | None:
        """Take charge of what takes the norm of each gradient, or return it to the caller, who measures the norms."""
        return each

    def holders(self, backend: Backend) -> Holders:
        """Return the holders of the gradients. This process has arrays of `backend`."""
        return holders_of(backend)


class OneProcess(Processes):
    """A process that makes the call alone, so there is nothing to agree on."""

    def ask(self, *_: object, **__: object) -> None:
        """Do nothing."""


_NOTHING_TO_TELL = nullcontext()
ONE_PROCESS = OneProcess()


@contextmanager
def telling(
    parameters: Parameters, process_group: ProcessGroups, mesh: Meshes, *, each: bool = False
) -> Iterator[None]:
    """Return a context for what precedes `preparing`: an error in it also ends the call on all processes."""
    try:
        yield
    except Exception:
        params = ParameterList.as_far_as_listed(parameters)
        if process_group is None and mesh is None and not (params.parameters or params.beside):
            raise  # nothing says whom to tell
        with processes_of(params, process_group, mesh, each=each).preparing():
            raise


def processes_of(params: ParameterList, process_group: ProcessGroups, mesh: Meshes, *, each: bool = False) -> Processes:
    """Return the processes that hold the gradients of the parameters, from the groups and meshes passed.

    `each`: the call has many norms, those of layers or units, not one.
    Raises ValueError if the parameters are shards and no argument names the other processes.
    """
    said = process_group is not None or mesh is not None
    named = (*as_tuple(process_group), *as_tuple(mesh)) if said else ()
    alone = not named and (not params.beside or all(beside is UNNAMED for beside in params.beside))
    alone = alone and not any_distributed(params.parameters) and not any_distributed(params.gradients)
    unsure = not said and among_several()
    if alone and not unsure:
        return ONE_PROCESS
    # Imported late: it imports torch.distributed, which may be missing.
    from gradclip._src.distributed import process_groups, shardings

    if unsure:
        shardings.check_unsaid(params)
    return ONE_PROCESS if alone else process_groups.ProcessGroups(params, named, each=each)
