"""The backend for traced JAX arrays and arrays on accelerators: XLA's operations, computed without reading values.

The reductions (`norms`) run in float64 even if 64-bit mode is off, inside `jax.enable_x64`. XLA's CPU code flushes
subnormal results to zero, also in conversions. Therefore this module makes results below the normal range zero.

XLA fuses all elementwise operations on an array into one loop. Rounding products toward zero therefore costs no extra
memory traffic and no extra kernel launches.

XLA may read subnormal numbers as zero, so below the smallest normal number elements may count as zero: the norm's
`floor` allows for that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from gradclip._src.backends.jax.operations import FLUSHED, as_integers, either, nearest, sum_by_rows, sums
from gradclip._src.backends.jax.placement import NamedAxes, in_one_piece, known_layout, like, of_numpy, typed_like
from gradclip._src.backends.portable import Portable
from gradclip._src.backends.sums import raised
from gradclip._src.core.arrays import Arrays, checked_dtype
from gradclip._src.core.coefficient import not_above_integer
from gradclip._src.core.formats import (
    FLOAT32,
    FLOAT64,
    Format,
    format_of,
    is_complex,
    low_bits_mask,
    sum_dtype,
)
from gradclip._src.core.layouts import Layout, Scope
from gradclip._src.core.protocols import Backend
from gradclip._src.core.rules import Into

if TYPE_CHECKING:
    from gradclip._src.core.rules import Coefficient


_SMALL, _BIG = 2.0**-400, 2.0**480
_UNIT = 2.0**600  # big numbers are in this unit, small ones in its inverse


class JaxTraced(Portable):
    """The backend for arrays whose values are not read.

    Backends with the same settings compare equal, so that JAX reuses its traces.
    """

    def __init__(self, *, visible: bool, axes: NamedAxes | None = None) -> None:
        super().__init__(jnp, FLOAT32 if jax.default_backend() == "tpu" else FLOAT64)
        self.divisors_above = self.wide.tiny  # The compiler may read smaller numbers as zero.
        self.divisors_up_to = 1.0 / self.wide.tiny  # The compiler multiplies by the inverse instead.
        self.visible = visible
        self.axes = axes
        self.on_cpu = jax.default_backend() == "cpu"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JaxTraced) and self._settings() == other._settings()

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

    @contextmanager
    def precision(self) -> Iterator[None]:
        # Users may forbid promotion in their own code. Here it is safe, and mixed dtypes need it.
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            yield

    def mesh(self, axis_name: Hashable) -> tuple[JaxTraced, NamedAxes]:
        return over_named(axis_name)

    def on_each_device(self, arrays: Arrays) -> Callable[..., Any] | None:
        # In eager mode, a `shard_map` call costs more than running the operations one by one.
        layout = known_layout(arrays) if self.wide is FLOAT64 and not self.visible else None
        if layout is None:
            return None
        mesh, specs, axes = layout
        local = sharded_over(axes)

        def run(compute: Callable[..., Any]) -> Any:
            call = jax.shard_map(
                lambda *shards: compute(local, axes, Arrays(shards)),
                mesh=mesh,
                in_specs=tuple(specs),
                out_specs=PartitionSpec(),
            )
            return call(*arrays)

        return run

    def prepare(self, leaf: object) -> jax.Array:
        # With 64-bit mode off, JAX would narrow NumPy float64 to float32.
        if self.visible and of_numpy(leaf):
            with self.precision():
                return prepared(leaf)
        return prepared(leaf)

    def types_of(self, leaves: Sequence[Any]) -> Sequence[Any]:
        # Keep only the type of a traced array: the array itself must not outlive the trace.
        return leaves if self.visible else [jax.typeof(x) if isinstance(x, jax.Array) else x for x in leaves]

    def prepare_in_place(self, leaf: object) -> jax.Array:
        return jnp.asarray(leaf)

    def writable(self, leaves: Sequence[Any]) -> bool:
        return all(of_numpy(leaf) and leaf.flags.writeable for leaf in leaves)

    def write(self, results: Sequence[jax.Array], into: Into) -> list[Any]:
        return list(map(self._put, into.leaves, results))

    def _put(self, leaf: Any, result: jax.Array) -> Any:
        """Return the clipped gradient. A writable NumPy array is changed in place and returned itself."""
        result = self.leave(result, leaf)
        if not (isinstance(result, np.ndarray) and self.writable([leaf])):
            return result
        leaf[...] = result
        return leaf

    def leave(self, array: jax.Array, leaf: object) -> Any:
        # The computation already determines the device of a traced result.
        return like(array, leaf) if self.visible else typed_like(array, leaf)

    def check_sum_dtype(self, dtype: str | None) -> None:
        check_64_bit_mode(dtype)

    def leave_sum(self, wide: jax.Array, x: jax.Array, dtype: str | None) -> jax.Array:
        return wide.astype(sum_dtype(x, wide, dtype))

    def leave_count(self, flags: jax.Array, leaves: Sequence[Any]) -> jax.Array:
        # Without a dtype, it would be int64 inside `enable_x64`.
        return jnp.sum(flags, dtype=jnp.int32)

    def booleans(self, mask: object) -> jax.Array:
        return jnp.asarray(mask, bool)

    def leave_scalar(self, value: jax.Array, dtype: str, leaves: Sequence[Any]) -> jax.Array:
        # A plain conversion would flush a subnormal norm to zero.
        return nearest(value) if dtype == "float32" and self.wide is FLOAT64 else value

    def scalar(self, value: float | jax.Array, near: Sequence[jax.Array]) -> jax.Array:
        if self.wide is FLOAT32 and isinstance(value, float) and value > 0:
            value = FLOAT32.toward_zero(value)  # a threshold must not become larger
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.integer):
            return not_above_integer(self, value)
        if self.wide is FLOAT32 and isinstance(value, jax.Array) and value.dtype == jnp.float64:
            nearest = value.astype(jnp.float32)
            # Not by bits, through which there is no derivative.
            return jnp.where(nearest > value, jnp.minimum(nearest * (1.0 - 2.0**-23), FLOAT32.largest), nearest)
        # A plain conversion would read a subnormal threshold as zero.
        is_float32 = isinstance(value, jax.Array) and value.dtype == jnp.float32
        return as_integers(value) if is_float32 and self.wide is FLOAT64 else jnp.asarray(value, self.wide_dtype)

    def bits(self, x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.int64 if x.dtype == jnp.float64 else jnp.int32)

    def from_bits(self, bits: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(bits, jnp.float64 if bits.dtype == jnp.int64 else jnp.float32)

    def complex(self, real: jax.Array, imag: jax.Array) -> jax.Array:
        return lax.complex(real, imag)

    def scaled(
        self, x: jax.Array, keep: jax.Array, blank: jax.Array, first: jax.Array, second: jax.Array | None
    ) -> jax.Array:
        return _scaled(self, x, keep, blank, first, second)

    def redo_where(
        self, flags: jax.Array, compute: Callable[[], tuple[jax.Array, jax.Array]], found: tuple[jax.Array, jax.Array]
    ) -> Any:
        # `where` alone would always compute both.
        again = partial(super().redo_where, flags, compute, found)
        return either(flags, again, lambda: found)

    def narrow(self, x: jax.Array, like: jax.Array) -> jax.Array:
        target = format_of(like)
        if target in FLUSHED and format_of(x) is FLOAT64:
            # A compiler may flush a subnormal result of a conversion, or round it up. Make it a zero of its sign.
            x = jnp.where(jnp.abs(x) < target.tiny, x * 0.0, x)
            return self.from_bits(self.bits(x) & low_bits_mask(format_of(x), target)).astype(like.dtype)
        return super().narrow(x, like)

    def not_above(self, product: jax.Array) -> jax.Array:
        """Return the product, or zero if it is below the normal range, where the compiler may or may not flush."""
        return jnp.where(jnp.abs(product) < format_of(product).tiny, product * 0.0, product)

    def shrink(self, arrays: Arrays, coefficient: Coefficient, layout: Layout) -> list[jax.Array]:
        if self.visible:
            return super().shrink(arrays, coefficient, layout)
        given = arrays.given if isinstance(arrays, Zeroed) else None
        # Without the barrier, XLA may recompute the arrays for the scaling, or keep a float64 copy from the norm.
        apart = Arrays(self._apart(list(given or arrays)))
        return super().shrink(super().without_nonfinite(apart) if given else apart, coefficient, layout)

    def without_nonfinite(self, arrays: Arrays) -> Arrays:
        zeroed = Zeroed(super().without_nonfinite(arrays).items)
        # Scaling zeroes the original arrays again as it reads them, so that no zeroed copy is written to memory.
        zeroed.given = arrays
        return zeroed

    def _apart(self, arrays: list[jax.Array]) -> list[jax.Array]:
        # With one shared barrier, each array would vary over the axes of all of them.
        return lax.optimization_barrier(arrays) if self.axes is None else list(map(lax.optimization_barrier, arrays))

    def weighted_sum(self, x: jax.Array, coefficient: Coefficient) -> jax.Array:
        if not (self.on_cpu and x.size and in_one_piece()):
            return super().weighted_sum(x, coefficient)
        return self.join([sum_by_rows(part, coefficient, self.widen) for part in self.parts(x)], x)

    def differentiable(self, function: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        # JAX traces everything it differentiates. The types outside the call stay 32-bit.
        if self.visible:
            return function
        # In an eager `jax.shard_map`, JAX compiles each operation anew at every call, but this as one program.
        whole = self.axes is not None
        call = jax.custom_jvp(jax.jit(function, inline=True) if whole else function)

        @call.defjvp
        def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
            results, norm, counts = made = call(*primals)
            leaves, max_norm, mask = primals
            mine = rule if self.axes is None else rule.over(self.axes)
            constant = max_norm is None or getattr(tangents[1], "dtype", None) == jax.dtypes.float0  # an integer
            # A traced number is weakly typed. It would become float64 in 64-bit mode, but its transpose is float32.
            change = 0.0 if constant else jnp.asarray(tangents[1], jnp.result_type(tangents[1]))
            dtypes = [result.dtype for result in results]

            def changes(leaves: Any, norm: Any, max_norm: Any, mask: Any, dleaves: Any, change: Any) -> Any:
                return mine.jvp(jnp, mine.at(leaves, norm, max_norm, mask), dleaves, change, dtypes)

            with self.precision():  # a leaf may be float64 even if 64-bit mode is off
                dys, dnorm = (jax.jit(changes, inline=True) if whole else changes)(
                    leaves, norm, max_norm, mask, tangents[0], change
                )
            return made, (dys, dnorm, [np.zeros(count.shape, jax.dtypes.float0) for count in counts])

        return call


# The operations on one array are a jitted function of their own, so JAX traces them once for each shape.
_power_sum_of = jax.jit(Portable.power_sum_of, static_argnums=(0, 2, 3))
_sums_by_range = jax.jit(JaxTraced.sums_by_range, static_argnums=(0, 2, 3))
_extremes = jax.jit(JaxTraced.extremes, static_argnums=(0, 2))


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


class Zeroed(Arrays):
    """Arrays with NaN and infinities replaced by zeros. `given` holds the original arrays."""

    given: Arrays | None = None


_checked: type[Backend] = JaxTraced

# Traced once for each shape, like the reductions.
_scaled = jax.jit(Portable.scaled, static_argnums=0)


def over_named(axis_name: Hashable) -> tuple[JaxTraced, NamedAxes]:
    """Return the backend for arrays sharded over the named axis or axes, and these axes."""
    axes = NamedAxes.named(axis_name)
    return sharded_over(axes), axes


def sharded_over(axes: NamedAxes) -> JaxTraced:
    """Return the backend for arrays sharded over the axes, for code in which each device sees its own shards."""
    backend = JaxTraced(visible=False, axes=axes)
    if backend.wide is not FLOAT64:
        raise ValueError(
            "axis_name needs devices that compute in float64. Omit it, and shard the arrays under jit instead."
        )
    return backend


def prepared(leaf: object) -> jax.Array:
    """Return a leaf as an array."""
    return checked_dtype(leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf))


def check_64_bit_mode(dtype: str | None) -> None:
    """Raise a ValueError if JAX cannot return this dtype because 64-bit mode is off."""
    if dtype is not None and "64" in dtype and not jax.config.jax_enable_x64:
        raise ValueError(
            f"sums in {dtype} need JAX's 64-bit mode. Call jax.config.update('jax_enable_x64', True) at the start, or "
            "make the call inside `with jax.enable_x64(True):`."
        )
