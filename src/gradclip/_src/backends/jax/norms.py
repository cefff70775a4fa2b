"""Norms of JAX arrays in XLA: one reduction reads each array once. No values are read on the host.

XLA may read subnormal numbers as zero, so below the smallest normal number elements may count as zero: the norm's
`floor` allows for that.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from gradclip._src.backends.jax.operations import FLUSHED, sums
from gradclip._src.backends.jax.placement import NamedAxes, in_one_piece
from gradclip._src.backends.portable import Portable
from gradclip._src.backends.sums import raised
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import FLOAT32, FLOAT64, Format, format_of, is_complex
from gradclip._src.core.layouts import Scope

_SMALL, _BIG = 2.0**-400, 2.0**480
_UNIT = 2.0**600  # big numbers are in this unit, small ones in its inverse


class JaxNorms(Portable):
    """The reductions. Backends with the same settings compare equal, so that JAX reuses its traces."""

    def __init__(self, *, visible: bool, axes: NamedAxes | None = None) -> None:
        super().__init__(jnp, FLOAT32 if jax.default_backend() == "tpu" else FLOAT64)
        self.divisors_above = self.wide.tiny  # The compiler may read smaller numbers as zero.
        self.divisors_up_to = 1.0 / self.wide.tiny  # The compiler multiplies by the inverse instead.
        self.visible = visible
        self.axes = axes
        self.on_cpu = jax.default_backend() == "cpu"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JaxNorms) and self._settings() == other._settings()

    def __hash__(self) -> int:
        return hash(self._settings())

    def _settings(self) -> Hashable:
        return type(self), self.wide, self.visible, self.axes, self.on_cpu

    def flushed_below(self, element: Format) -> float:
        if element is self.wide or self.wide is not FLOAT64:
            return self.wide.tiny
        return element.tiny if element in FLUSHED else 0.0

    def scaled_power_sum(self, arrays: Arrays, p: float, scope: Scope) -> tuple[jax.Array, jax.Array]:
        if p not in (1, 2) or self.wide is not FLOAT64 or self.axes is not None or not in_one_piece():
            return super().scaled_power_sum(arrays, p, scope)
        found = [_sums_by_range(self, x, p, scope) for x in arrays]
        return joined([self.total(of_kind) for of_kind in zip(*found, strict=True)], p)

    def sums_by_range(self, x: jax.Array, p: float, scope: Scope) -> list[jax.Array]:
        """Return the sums of powers of the small, middle and big numbers, each in its own unit."""
        kinds = [by_range(base) for base in self.bases(x, p)]
        terms = [raised(self.xp, wide, p) for of_base in kinds for wide in of_base]
        found = sums(terms, scope.shared_axes(x.ndim))
        return [sum(found[kind::3]) for kind in range(3)]

    def stacked(self, scalars: Sequence[jax.Array]) -> jax.Array:
        # Without the barrier, XLA turns a sum over the vector into a sum of many scalars, recomputed at every use.
        try:
            vector = jnp.stack(scalars)
        except ValueError as error:
            apart = _apart(scalars)
            if apart is None:
                raise
            raise apart from error
        return vector if self.visible else lax.optimization_barrier(vector)

    def power_sum_of(self, x: jax.Array, p: float, scope: Scope, divisor: jax.Array | None) -> jax.Array:
        return _power_sum_of(self, x, p, scope, divisor)

    def one_reduction(self) -> bool:
        """Say whether to compute two sums by one reduction. XLA's partitioned code would gather the results."""
        return self.on_cpu and in_one_piece()

    def bases(self, x: jax.Array, p: float) -> list[jax.Array]:
        bases = super().bases(x, p)
        if len(bases) > 1 or format_of(x) is FLOAT64 or not self.one_reduction():
            return bases
        # XLA's CPU code stores narrower numbers in float64 before it sums them, unless the reduction computes another
        # sum too. The barrier hides that its terms are zeros.
        return [*bases, jnp.broadcast_to(lax.optimization_barrier(jnp.float64(0.0)), x.shape)]

    def sum_all(self, powers: Sequence[jax.Array], scope: Scope) -> jax.Array:
        if len(powers) == 1 or not self.one_reduction():
            return super().sum_all(powers, scope)
        return sum(sums(powers, scope.shared_axes(powers[0].ndim)))

    def largest_of(self, x: jax.Array, scope: Scope) -> jax.Array:
        return _extremes(self, x, scope)[0]

    def smallest_of(self, x: jax.Array, scope: Scope) -> jax.Array:
        largest, smallest = _extremes(self, x, scope)
        return jnp.where(jnp.isfinite(largest), smallest, jnp.nan)

    def extremes(self, x: jax.Array, scope: Scope) -> list[jax.Array]:
        """Return the largest magnitude (NaN if one is NaN) and the smallest magnitude that is not NaN."""
        magnitude = self.magnitude(x) if is_complex(x) else jnp.abs(x)
        axes = scope.shared_axes(x.ndim)
        return [self.widen(jnp.max(magnitude, axis=axes)), self.widen(jnp.min(magnitude, axis=axes))]


# The operations on one array are a jitted function of their own, so JAX traces them once for each shape.
_power_sum_of = jax.jit(Portable.power_sum_of, static_argnums=(0, 2, 3))
_sums_by_range = jax.jit(JaxNorms.sums_by_range, static_argnums=(0, 2, 3))
_extremes = jax.jit(JaxNorms.extremes, static_argnums=(0, 2))


def _apart(scalars: Sequence[jax.Array]) -> ValueError | None:
    """Return the error for numbers of arrays that lie on different devices; None if they do not."""
    known = [x for x in scalars if not isinstance(x, jax.core.Tracer)]
    places = {str(sorted(device.id for device in x.devices())): x for x in known}
    if len(places) < 2:
        return None
    return ValueError(
        "arrays that share a norm must lie on the same devices, or each on one of its own, got arrays on the devices "
        f"{' and '.join(places)}. Put all on the devices of those that are spread over several: "
        "jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())), with the mesh of these."
    )


def by_range(wide: jax.Array) -> list[jax.Array]:
    """Split the magnitudes of float64 numbers into three arrays: small, middle and big ones, with zeros elsewhere.

    Small and big numbers are scaled by their units. All squares stay in range, and so do sums of up to 2**40 squares.
    """
    magnitude = jnp.abs(wide)
    small, big = magnitude < _SMALL, magnitude > _BIG
    # Select the unit with `where`: a compiler may square a constant factor separately, and that square overflows.
    scaled = magnitude * jnp.where(small, _UNIT, jnp.where(big, 1.0 / _UNIT, 1.0))
    return [jnp.where(small, scaled, 0.0), jnp.where(small | big, 0.0, scaled), jnp.where(big, scaled, 0.0)]


def joined(by_range: Sequence[jax.Array], p: float) -> tuple[jax.Array, jax.Array]:
    """Join the three sums of powers (order 1 or 2) into one sum and its divisor. Small ones vanish next to big ones."""
    small, middle, big = by_range
    any_big, only_small = big > 0, (middle == 0) & (small > 0)
    of_middle, of_small = jnp.where(any_big, 1.0 / _UNIT, 1.0), jnp.where(only_small, 1.0, 1.0 / _UNIT)
    for _ in range(int(p)):  # terms that become subnormal are negligible in the total
        middle, small = middle * of_middle, small * of_small
    total = jnp.where(any_big, big + middle, middle + small)
    return total, jnp.where(any_big, _UNIT, jnp.where(only_small, 1.0 / _UNIT, 1.0))
