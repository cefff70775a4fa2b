"""Norms of JAX arrays in XLA: one reduction reads each array once. No values are read on the host.

XLA's CPU code reads float32 and bfloat16 subnormals as zero, so numbers are decoded from their bits. If XLA chooses how
to partition the work, numbers are first read normally, and again by their bits if the norm is so small that it matters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradclip.backends.jax.axes import NamedAxes, in_one_piece
from gradclip.backends.jax.branches import either
from gradclip.backends.jax.reading import (
    FLUSHED,
    Reading,
    as_integers,
    both_kinds,
    by_range,
    extremes,
    joined,
    magnitude_bits,
    sums,
)
from gradclip.backends.portable import Portable
from gradclip.backends.sums import raised
from gradclip.core.arrays import Arrays
from gradclip.core.formats import FLOAT16, FLOAT32, FLOAT64, Format, format_of, is_complex
from gradclip.core.scopes import Scope


class JaxNorms(Portable):
    """The reductions. Backends with the same settings compare equal, so that JAX reuses its traces."""

    def __init__(self, *, visible: bool, axes: NamedAxes | None = None) -> None:
        super().__init__(jnp, FLOAT32 if jax.default_backend() == "tpu" else FLOAT64)
        self.divisors_above = self.wide.tiny  # The compiler may read smaller numbers as zero.
        self.divisors_up_to = 1.0 / self.wide.tiny  # The compiler multiplies by the inverse instead.
        self.visible = visible
        self.axes = axes
        self.on_cpu = jax.default_backend() == "cpu"
        self.reading = Reading.AS_THEY_ARE

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JaxNorms) and self._settings() == other._settings()

    def __hash__(self) -> int:
        return hash(self._settings())

    def _settings(self) -> Hashable:
        return type(self), self.wide, self.visible, self.axes, self.on_cpu, self.reading

    def flushed_below(self, element: Format) -> float:
        # In all other cases, `with_care` reads subnormals correctly.
        if element is self.wide or self.wide is not FLOAT64:
            return self.wide.tiny
        return element.tiny if element in FLUSHED and not self.on_cpu else 0.0

    def widen(self, x: jax.Array) -> jax.Array:
        return as_integers(x) if self._reads_bits(x) else super().widen(x)

    def _reads_bits(self, x: jax.Array) -> bool:
        # XLA's CPU code would not fuse the sums of float16 either.
        known = {Reading.AS_THEY_ARE: (), Reading.BITS: FLUSHED, Reading.BITS_AT_ONCE: {*FLUSHED, FLOAT16}}
        return format_of(x) in known[self.reading]

    def with_care(self, compute: Callable[[Any], Any], arrays: Arrays, count: int) -> Any:
        if not self.on_cpu or arrays.formats == {FLOAT64}:
            return compute(self)
        if in_one_piece():
            return compute(self._careful(Reading.BITS_AT_ONCE))
        if not arrays.formats & FLUSHED:
            return compute(self)
        # First read subnormals as zero. Elements below 2**-126 add at most count * 2**-126 to the norm, which is
        # negligible if the norm is 2**60 times that. Otherwise repeat the sum, decoding the bits as integers.
        value, divisor = compute(self)
        size = value if divisor is None else value * divisor
        again = partial(compute, self._careful(Reading.BITS))
        return either(size < count * 2.0**-66, again, lambda: (value, divisor))

    def _careful(self, reading: Reading) -> JaxNorms:
        careful = copy.copy(self)
        careful.reading = reading
        return careful

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
        vector = jnp.stack(scalars)
        return vector if self.visible else lax.optimization_barrier(vector)

    def power_sum_of(self, x: jax.Array, p: float, scope: Scope, divisor: jax.Array | None) -> jax.Array:
        return _power_sum_of(self, x, p, scope, divisor)

    def bases(self, x: jax.Array, p: float) -> list[jax.Array]:
        if self.reading is not Reading.BITS_AT_ONCE or not self._reads_bits(x) or (is_complex(x) and p != 2):
            return super().bases(x, p)
        return [base for part in self.parts(x) for base in both_kinds(part)]

    def sum_all(self, powers: Sequence[jax.Array], scope: Scope) -> jax.Array:
        if self.reading is not Reading.BITS_AT_ONCE or len(powers) == 1:
            return super().sum_all(powers, scope)
        return sum(sums(powers, scope.shared_axes(powers[0].ndim)))

    def largest_of(self, x: jax.Array, scope: Scope) -> jax.Array:
        return _extremes(self, x, scope)[0]

    def smallest_of(self, x: jax.Array, scope: Scope) -> jax.Array:
        largest, smallest = _extremes(self, x, scope)
        return jnp.where(jnp.isfinite(largest), smallest, jnp.nan)

    def extremes(self, x: jax.Array, scope: Scope) -> list[jax.Array]:
        """Return the largest magnitude (NaN if one is NaN) and the smallest magnitude that is not NaN."""
        axes = scope.shared_axes(x.ndim)
        if is_complex(x):
            return _each_extreme(self.magnitude(x), axes)
        if not self._reads_bits(x):
            return list(map(self.widen, _each_extreme(jnp.abs(x), axes)))
        found = (extremes if self.reading is Reading.BITS_AT_ONCE else _each_extreme)(magnitude_bits(x), axes)
        return [self.widen(lax.bitcast_convert_type(one, x.dtype)) for one in found]


# The operations on one array are a jitted function of their own, so JAX traces them once for each shape.
_power_sum_of = jax.jit(Portable.power_sum_of, static_argnums=(0, 2, 3))
_sums_by_range = jax.jit(JaxNorms.sums_by_range, static_argnums=(0, 2, 3))
_extremes = jax.jit(JaxNorms.extremes, static_argnums=(0, 2))


def _each_extreme(x: jax.Array, axes: tuple[int, ...]) -> list[jax.Array]:
    return [jnp.max(x, axis=axes), jnp.min(x, axis=axes)]
