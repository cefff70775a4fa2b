"""Norms of JAX arrays sharded over the devices of a mesh, each computed with one reduction.

`MeshAxes` is for code that runs on each device's own shards, with named mesh axes (`jax.shard_map`). `ExplicitMesh` is
for code on whole arrays whose sharding JAX knows. It runs the measurement on each device.
"""

from dataclasses import dataclass, replace
from typing import Any

from gradclip._src.core import accumulators
from gradclip._src.core.accumulators import LARGEST_ORDER, check_order
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.holders import ALONE, Holders
from gradclip._src.core.layouts import Groups
from gradclip._src.core.norms import Norm, Order
from gradclip._src.core.protocols import Axes, Backend
from gradclip.typing import AxisName


@dataclass(frozen=True)
class MeshAxes(Holders):
    """The devices along mesh axes, for code that runs on each device's own shards (`jax.shard_map`)."""

    axes: Axes

    def measure(self, backend: Backend, arrays: Arrays, order: Order) -> Norm:
        """Return the norm of all shards. Raises ValueError if the order is too high."""
        count = arrays.elements()
        norm = self.reduced(backend, arrays, check_order(order))
        return replace(norm, floor=backend.floor(arrays, count * self.axes.count(), order)) if count else norm

    def reduced(self, backend: Backend, arrays: Arrays, order: Order) -> Norm:
        """Return the norm, without its floor, with one reduction over the axes."""
        groups = [group.as_precise_as(arrays.dtypes) for group in self.axes.groups(arrays)]
        parts = [backend.norms(group, order) for group in groups]
        if not parts:
            return backend.norms(arrays, order)
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
