"""The backend for traced JAX arrays and arrays on accelerators: XLA's operations, computed without reading values.

The reductions (`norms`) run in float64 even if 64-bit mode is off, inside `jax.enable_x64`. XLA's CPU code flushes
subnormal results to zero, also in conversions. Therefore this module makes results below the normal range zero.

XLA fuses all elementwise operations on an array into one loop. Rounding products toward zero therefore costs no extra
memory traffic and no extra kernel launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from gradclip._src.backends.jax.norms import JaxNorms
from gradclip._src.backends.jax.operations import FLUSHED, as_integers, either, nearest, sum_by_rows
from gradclip._src.backends.jax.placement import NamedAxes, in_one_piece, known_layout, like, of_numpy, typed_like
from gradclip._src.backends.portable import Portable
from gradclip._src.core.arrays import Arrays, checked_dtype
from gradclip._src.core.formats import (
    FLOAT32,
    FLOAT64,
    format_of,
    low_bits_mask,
    sum_dtype,
)
from gradclip._src.core.layouts import Layout
from gradclip._src.core.protocols import Backend
from gradclip._src.core.rules import Into

if TYPE_CHECKING:
    from gradclip._src.core.rules import Coefficient


class Zeroed(Arrays):
    """Arrays with NaN and infinities replaced by zeros. `given` holds the original arrays."""

    given: Arrays | None = None


class JaxTraced(JaxNorms):
    """The backend for arrays whose values are not read."""

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
            # A compiler may flush a subnormal result of a conversion, or round it up. Make it zero.
            x = jnp.where(jnp.abs(x) < target.tiny, 0.0, x)
            return self.from_bits(self.bits(x) & low_bits_mask(format_of(x), target)).astype(like.dtype)
        return super().narrow(x, like)

    def not_above(self, product: jax.Array) -> jax.Array:
        """Return the product, or zero if it is below the normal range, where the compiler may or may not flush."""
        return jnp.where(jnp.abs(product) < format_of(product).tiny, 0.0, product)

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
            mine = rule if self.axes is None else replace(rule, total=self.axes.total)
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
