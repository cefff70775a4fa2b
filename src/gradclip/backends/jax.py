"""JAX: concrete arrays on the CPU as host memory; tracers and accelerators through the portable operations.

Two things are particular. The reductions run in float64 though 64-bit mode is off, inside `jax.enable_x64`. And
XLA's CPU code reads float32 and bfloat16 subnormals as zero and flushes results to zero, conversions included, so
those numbers are read and written here as integers.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradclip.backends.formats import BFLOAT16, FLOAT32, FLOAT64, format_of
from gradclip.backends.numpy import Host, HostArray, checked_dtype, sum_dtype
from gradclip.backends.portable import Portable

_UNSIGNED = {2: jnp.uint16, 4: jnp.uint32}


class JaxHost(Host):
    """Concrete arrays on one CPU device, viewed as NumPy arrays."""

    def prepare(self, leaf: Any) -> jax.Array:
        return prepared(leaf)

    def prepare_in_place(self, leaf: Any, name: str) -> jax.Array:
        return checked_dtype(jnp.asarray(leaf), name)

    def writable(self, leaf: Any) -> bool:
        return False

    def enter(self, leaf: jax.Array) -> HostArray:
        return replace(HostArray.of(np.asarray(leaf)), origin=leaf)

    def shrink(self, x: HostArray, coefficient: Any) -> HostArray:
        return x if coefficient.keep else super().shrink(x, coefficient)

    def leave(self, array: HostArray, leaf: Any) -> jax.Array:
        if array.origin is not None:
            return array.origin
        data = array.data
        if array.dtype == BFLOAT16.name:
            data = data.view(jnp.bfloat16)
        return jax.device_put(data, getattr(leaf, "sharding", None))

    def leave_sum(self, wide: np.ndarray, x: HostArray) -> jax.Array:
        return jnp.asarray(super().leave_sum(wide, x))

    def leave_count(self, flags: np.ndarray) -> jax.Array:
        return jnp.asarray(super().leave_count(flags), jnp.int32)

    def leave_scalar(self, value: Any, dtype: str, leaves: Sequence[Any]) -> jax.Array:
        return jnp.asarray(super().leave_scalar(value, dtype, leaves))


class Jax(Portable):
    """Arrays whose values are not looked at."""

    def __init__(self, *, visible: bool) -> None:
        super().__init__(jnp, FLOAT32 if jax.default_backend() == "tpu" else FLOAT64)
        self.visible = visible

    def precision(self) -> AbstractContextManager[Any]:
        return jax.enable_x64(True)

    def flushed_below(self, x: jax.Array) -> float:
        return self.wide.tiny if format_of(x) is self.wide else 0.0

    def prepare(self, leaf: Any) -> jax.Array:
        return prepared(leaf)

    def prepare_in_place(self, leaf: Any, name: str) -> jax.Array:
        return checked_dtype(jnp.asarray(leaf), name)

    def update(self, leaf: Any, x: Any, new: Any, coefficient: Any) -> jax.Array:
        return self.shrink(new, coefficient)

    def update_clamped(self, leaf: Any, x: jax.Array, bound: float) -> jax.Array:
        return self.clamp(x, bound)

    def enter(self, leaf: jax.Array) -> jax.Array:
        return leaf

    def leave(self, array: jax.Array, leaf: Any) -> jax.Array:
        return array

    def leave_sum(self, wide: jax.Array, x: jax.Array) -> jax.Array:
        return wide.astype(sum_dtype(x, wide))

    def leave_count(self, flags: jax.Array) -> jax.Array:
        return jnp.sum(flags, dtype=jnp.int32)

    def booleans(self, mask: Any) -> jax.Array:
        return jnp.asarray(mask, bool)

    def leave_scalar(self, value: jax.Array, dtype: str, leaves: Sequence[Any]) -> jax.Array:
        return nearest(value) if dtype == "float32" else value

    def scalar(self, value: Any, near: Sequence[jax.Array]) -> jax.Array:
        is_float32 = isinstance(value, jax.Array) and value.dtype == jnp.float32
        return self.widen(value) if is_float32 else jnp.asarray(value, self.wide_dtype)

    def zeros(self, shape: tuple[int, ...], near: Sequence[jax.Array]) -> jax.Array:
        return jnp.zeros(shape, self.wide_dtype)

    def gather(self, terms: Sequence[jax.Array]) -> list[jax.Array]:
        return list(terms)

    def bits(self, x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.int64 if self.wide is FLOAT64 else jnp.int32)

    def from_bits(self, bits: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(bits, self.wide_dtype)

    def complex(self, real: jax.Array, imag: jax.Array) -> jax.Array:
        return lax.complex(real, imag)

    def widen(self, x: jax.Array) -> jax.Array:
        target = format_of(x)
        if target.precision == self.wide.precision or self.wide is not FLOAT64:
            return x.astype(self.wide_dtype)
        sign, magnitude = split_sign(x)
        below_normal = magnitude.astype(jnp.int32).astype(self.wide_dtype) * target.step
        is_normal = magnitude >= 1 << (target.precision - 1)
        return jnp.where(is_normal, x.astype(self.wide_dtype), jnp.where(sign > 0, -below_normal, below_normal))

    def narrow(self, wide: jax.Array, like: jax.Array) -> jax.Array:
        target = format_of(like)
        result = super().narrow(wide, like)
        if target.precision == self.wide.precision or self.wide is not FLOAT64:
            return result
        return with_subnormals(wide, result, jnp.trunc)

    def clamped(self, prepared: jax.Array, leaf: Any, bound: Any) -> jax.Array:
        return self.clamp(prepared, bound)

    def differentiable(self, function: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        """Attach the rule as a `jax.custom_jvp`; the call keeps 32-bit types on its outside."""
        call = jax.custom_jvp(function)

        @call.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            leaves, max_norm = primals
            clipped, norm = call(leaves, max_norm)
            mine = rule if max_norm is None else replace(rule, max_norm=max_norm)
            change = 0.0 if max_norm is None else tangents[1]
            dys, dnorm = mine.jvp(jnp, leaves, tangents[0], norm, change)
            return (clipped, norm), (dys[: len(clipped)], dnorm)

        return call


def prepared(leaf: Any) -> jax.Array:
    """Return the array of a leaf, integers promoted to the default float."""
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jnp.integer):
        array = array.astype(jnp.result_type(float))
    return checked_dtype(array)


def split_sign(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the sign bit and the other bits of a real array, as unsigned integers of its size."""
    bits = lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])
    sign = bits & bits.dtype.type(1 << (8 * x.dtype.itemsize - 1))
    return sign, bits ^ sign


def with_subnormals(wide: jax.Array, result: jax.Array, rounding: Callable[..., Any]) -> jax.Array:
    """Return `result` with the float64 numbers below its normal range put in as integers."""
    target = format_of(result)
    units = rounding(jnp.abs(wide) / target.step)
    small = jnp.abs(wide) < target.tiny
    unsigned = _UNSIGNED[result.dtype.itemsize]
    sign = jnp.where(wide < 0, 1 << (8 * result.dtype.itemsize - 1), 0).astype(unsigned)
    bits = jnp.where(small, units, 0.0).astype(jnp.int32).astype(unsigned) | sign
    return jnp.where(small, lax.bitcast_convert_type(bits, result.dtype), result)


def nearest(wide: jax.Array) -> jax.Array:
    """Return a float64 array in float32, rounded to nearest."""
    return with_subnormals(wide, wide.astype(jnp.float32), jnp.round)


def in_host_memory(array: Any) -> bool:
    """Say whether the values of an array lie in host memory and may be looked at."""
    if isinstance(array, jax.core.Tracer):
        return False
    devices = array.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def backend(leaves: Sequence[Any], scalars: Sequence[Any]) -> JaxHost | Jax:
    """Return the backend for these arrays: the host's where all of them lie in its memory."""
    arrays = [x for x in (*leaves, *scalars) if isinstance(x, jax.Array)]
    if all(map(in_host_memory, arrays)):
        return HOST
    return Jax(visible=not any(isinstance(x, jax.core.Tracer) for x in arrays))


HOST = JaxHost()
