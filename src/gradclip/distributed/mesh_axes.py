"""Devices of a mesh as holders: each has a shard of every array, and their norm takes one reduction.

Either the code runs on each device's own shards, and the mesh axes are named (`MeshAxes`), or it runs on whole arrays
of which JAX says how they are sharded (`ExplicitMesh`), and goes to each device to measure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradclip.backends import Axes, Backend
from gradclip.backends.arrays import Arrays
from gradclip.core import accumulators, norms
from gradclip.core.accumulators import LARGEST_ORDER, check_order
from gradclip.core.holders import ALONE, Holders
from gradclip.core.norms import Norm, Order, floor_of, measure
from gradclip.typing import AxisName


@dataclass(frozen=True)
class MeshAxes(Holders):
    """The devices along axes of a mesh, in code that runs on each one's own shards (`jax.shard_map`)."""

    axes: Axes

    def measure(self, backend: Backend, arrays: Arrays, order: Order) -> Norm:
        """Return the norm of all shards. Raises ValueError where the order is too high."""
        count = arrays.elements()
        norm = self.reduced(backend, arrays, check_order(order))
        return replace(norm, floor=floor_of(backend, arrays, count * self.axes.count(), order)) if count else norm

    def reduced(self, backend: Backend, arrays: Arrays, order: Order) -> Norm:
        """Return the norm but for its floor, by one reduction over the axes."""
        groups = [group.as_precise_as(arrays.dtypes) for group in self.axes.groups(arrays)]
        parts = [measure(backend, group, order) for group in groups]
        if not parts:
            return measure(backend, arrays, order)
        known = [
            accumulators.filled(backend.xp, norm, order, empty=not x.elements())
            for norm, x in zip(parts, groups, strict=True)
        ]
        reduce = self.axes.largest if order.extreme else self.axes.total
        sums = reduce(list(map(backend.xp.stack, known)))
        whole = accumulators.norm_of(backend, sums, order, len(parts) * self.axes.count())
        return replace(whole, error=max(norm.error for norm in parts)) if order.extreme else whole


class ExplicitMesh(Holders):
    """The devices over which JAX shards the arrays of traced code, as far as their types say so."""

    sees_all = True  # the arrays are whole ones

    def measure(self, backend: Backend, arrays: Arrays, order: Order) -> Norm:
        """Return the norm, of which each device measures its shards where the layout is known and the order low."""
        count = arrays.elements()
        run = backend.on_each_device(arrays) if order.extreme or order.p <= LARGEST_ORDER else None
        if run is None or not count:
            return measure(backend, arrays, order)

        def compute(local: Backend, axes: Axes, shards: Arrays) -> tuple[Any, Any, Any]:
            norm = MeshAxes(axes).reduced(local, shards, order)
            return norm.value, norm.divisor, backend.scalar(norm.error, shards)

        value, divisor, error = run(compute)
        return Norm(value, divisor, error, floor_of(backend, arrays, count, order))

    def measure_each(self, backend: Backend, groups: Sequence[Arrays], order: Order) -> Norm:
        """Return the norms as a vector, which take one computation where no layout is known."""
        if all(backend.on_each_device(group) is None for group in groups):
            return norms.measure_each(backend, groups, order)
        return super().measure_each(backend, groups, order)


EXPLICIT_MESH = ExplicitMesh()


def holders_of(backend: Backend) -> Holders:
    """Return who holds the arrays of a backend: one process, or devices of a mesh, which only traced code tells."""
    return ALONE if backend.visible else EXPLICIT_MESH


def over_axes(backend: Backend, axis_name: AxisName) -> tuple[Backend, Holders]:
    """Return the backend of shards over mesh axes that are named, and the devices along these as holders."""
    local, axes = backend.over(axis_name)
    return local, MeshAxes(axes)
