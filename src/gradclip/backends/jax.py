"""JAX: concrete arrays on the CPU as host memory; tracers there with the kernels; others through XLA's operations.

Two things are particular. The reductions run in float64 though 64-bit mode is off, inside `jax.enable_x64`. And
XLA's CPU code reads float32 and bfloat16 subnormals as zero and flushes results to zero, conversions included: a
reduction whose result that could change is done again with the numbers read as integers (the kernels read them as they
are), and results below the normal range become zero.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradclip import native
from gradclip.backends.arrays import Arrays, checked_dtype
from gradclip.backends.formats import BFLOAT16, FLOAT32, FLOAT64, Format, format_of
from gradclip.backends.host import HostArray, HostArrays
from gradclip.backends.jax_examples import SumsByRows
from gradclip.backends.jax_kernels import extremes, power_sums, usable
from gradclip.backends.numpy import Host, known_to_buffers, sum_dtype
from gradclip.backends.portable import ENOUGH, low_bits_mask

_ALIGNMENT = 64  # bytes
# XLA's CPU code reads subnormals of these as zero, although float64 holds them.
_FLUSHED = frozenset({FLOAT32, BFLOAT16})


class JaxHost(Host):
    """Concrete arrays on one CPU device, viewed as NumPy arrays."""

    def prepare(self, leaf: Any) -> jax.Array:
        return prepared(leaf)

    def prepare_in_place(self, leaf: Any) -> jax.Array:
        return jnp.asarray(leaf)

    def writable(self, leaf: Any) -> bool:
        return False

    def enter(self, prepared: Sequence[jax.Array]) -> HostArrays:
        views = list(map(np.asarray, prepared))
        known = native.describe_buffers(list(map(known_to_buffers, views)))
        return HostArrays(list(zip(views, prepared, strict=True)), _with_origin, known)

    def empty_like(self, x: HostArray) -> HostArray:
        """Return an array aligned so that JAX takes its memory over instead of copying it."""
        memory = np.empty(x.data.nbytes + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        aligned = memory[start : start + x.data.nbytes].view(x.data.dtype)
        return HostArray(aligned.reshape(x.shape), x.dtype)

    def shrink(self, arrays: Arrays, coefficient: Any) -> list[HostArray]:
        return list(arrays) if coefficient.keep else super().shrink(arrays, coefficient)

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


class Jax(SumsByRows):
    """Arrays whose values are not looked at."""

    def __init__(self, *, visible: bool) -> None:
        super().__init__(jnp, FLOAT32 if jax.default_backend() == "tpu" else FLOAT64)
        self.visible = visible
        self.on_cpu = jax.default_backend() == "cpu"
        self.precise = False

    def precision(self) -> AbstractContextManager[Any]:
        return jax.enable_x64(True)

    def flushed_below(self, element: Format) -> float:
        """Return the format's smallest normal number, or 0.0 where its subnormals are read with care."""
        if element is self.wide or self.wide is not FLOAT64:
            return self.wide.tiny
        return element.tiny if element in _FLUSHED and not self.on_cpu else 0.0

    def prepare(self, leaf: Any) -> jax.Array:
        return prepared(leaf)

    def prepare_in_place(self, leaf: Any) -> jax.Array:
        return jnp.asarray(leaf)

    def update(self, leaves: Sequence[Any], arrays: Arrays, new: Arrays, coefficient: Any) -> list[jax.Array]:
        return self.shrink(new, coefficient)

    def update_clamped(self, leaves: Sequence[Any], arrays: Arrays, bound: float) -> list[jax.Array]:
        return [self.clamp(x, bound) for x in arrays]

    def leave(self, array: jax.Array, leaf: Any) -> jax.Array:
        return array

    def leave_sum(self, wide: jax.Array, x: jax.Array) -> jax.Array:
        return wide.astype(sum_dtype(x, wide))

    def leave_count(self, flags: jax.Array) -> jax.Array:
        return jnp.sum(flags, dtype=jnp.int32)

    def booleans(self, mask: Any) -> jax.Array:
        return jnp.asarray(mask, bool)

    def leave_scalar(self, value: jax.Array, dtype: str, leaves: Sequence[Any]) -> jax.Array:
        return nearest(value) if dtype == "float32" and self.wide is FLOAT64 else value

    def scalar(self, value: Any, near: Sequence[jax.Array]) -> jax.Array:
        is_float32 = isinstance(value, jax.Array) and value.dtype == jnp.float32
        return as_integers(value) if is_float32 and self.wide is FLOAT64 else jnp.asarray(value, self.wide_dtype)

    def zeros(self, shape: tuple[int, ...], near: Sequence[jax.Array]) -> jax.Array:
        return jnp.zeros(shape, self.wide_dtype)

    def bits(self, x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.int64 if x.dtype == jnp.float64 else jnp.int32)

    def from_bits(self, bits: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(bits, jnp.float64 if bits.dtype == jnp.int64 else jnp.float32)

    def complex(self, real: jax.Array, imag: jax.Array) -> jax.Array:
        return lax.complex(real, imag)

    def widen(self, x: jax.Array) -> jax.Array:
        return as_integers(x) if self.precise and format_of(x) in _FLUSHED else super().widen(x)

    def with_care(self, compute: Callable[[], Any], arrays: Arrays, count: int) -> Any:
        """Compute a norm with subnormals read as zero, and again as integers if they could matter.

        Elements below 2**-126 add at most count * 2**-126 to it, which 60 binary digits above that is nothing.
        """
        value, divisor = compute()
        if not (self.on_cpu and arrays.formats & _FLUSHED):
            return value, divisor

        def carefully() -> Any:
            self.precise = True
            try:
                return compute()
            finally:
                self.precise = False

        size = value if divisor is None else value * divisor
        return lax.cond(jnp.any(size < count * 2.0**-66), carefully, lambda: (value, divisor))

    def narrow(self, x: jax.Array, like: jax.Array) -> jax.Array:
        target = format_of(like)
        if target in _FLUSHED and format_of(x) is FLOAT64:
            # Whether a conversion to a subnormal flushes it or rounds it up is up to the compiler: make it zero here.
            x = jnp.where(jnp.abs(x) < target.tiny, 0.0, x)
            return self.from_bits(self.bits(x) & low_bits_mask(format_of(x), target)).astype(like.dtype)
        return super().narrow(x, like)

    def not_above(self, product: jax.Array) -> jax.Array:
        """Return the product, zero where it lies below the normal range: there the compiler flushes as it likes."""
        return jnp.where(jnp.abs(product) < format_of(product).tiny, 0.0, product)

    def shrink(self, arrays: Arrays, coefficient: Any) -> list[jax.Array]:
        # Without the barrier XLA may compute the arrays a second time for this, or keep a float64 copy for the norm.
        return super().shrink(Arrays(lax.optimization_barrier(list(arrays))), coefficient)

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


class JaxKernels(Jax):
    """Traced arrays on the CPU, read by the kernels, which know subnormal numbers."""

    splits_by_range = False

    def sum_error(self, count: int, arrays: Arrays, p: float) -> float:
        error = super().sum_error(min(count, native.ADDITIONS), arrays, p)
        return error + native.HALF_SQUARES_ERROR if p == 2 and arrays.only_halves else error

    def with_care(self, compute: Callable[[], Any], arrays: Arrays, count: int) -> Any:
        return compute()

    def power_sum(self, arrays: Arrays, p: float, divisor: Any = None, *, batched: bool = False) -> jax.Array:
        return self._power_sums(arrays, p, -1.0, batched)[0]

    def scaled_power_sum(self, arrays: Arrays, p: float, *, batched: bool = False) -> tuple[jax.Array, jax.Array]:
        return self._power_sums(arrays, p, ENOUGH if p in (1, 2) else math.inf, batched)

    def _power_sums(self, arrays: Arrays, p: float, enough: float, batched: bool) -> tuple[jax.Array, jax.Array]:
        def portable(arrays: Arrays, result: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return super(JaxKernels, self).power_sum(arrays, p, result[1], batched=batched), result[1]

        return self._read(partial(power_sums, p=p, enough=enough, rows=rows_of(arrays, batched)), portable, arrays)

    def largest(self, arrays: Arrays, *, batched: bool = False) -> jax.Array:
        return self._extreme(0, super().largest, arrays, batched)

    def smallest(self, arrays: Arrays, *, batched: bool = False) -> jax.Array:
        return self._extreme(1, super().smallest, arrays, batched)

    def _extreme(self, index: int, portable: Callable[..., Any], arrays: Arrays, batched: bool) -> jax.Array:
        rows = rows_of(arrays, batched)
        return self._read(
            lambda arrays: extremes(arrays, rows)[index], lambda arrays, _: portable(arrays, batched=batched), arrays
        )

    def _read(self, reduce: Callable[..., Any], portable: Callable[..., Any], arrays: Arrays) -> Any:
        """Return what the kernels make of the arrays; it changes with them as what XLA's own operations would."""
        read = jax.custom_jvp(reduce)

        @read.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            result = read(*primals)
            with self.precision():
                return result, jax.jvp(lambda arrays: portable(Arrays(arrays), result), primals, tangents)[1]

        return read(list(arrays))


def rows_of(arrays: Arrays, batched: bool) -> tuple[int, ...]:
    """Return the shape of results that are one number for each example, or one for all."""
    return arrays[0].shape[: int(batched)]


def prepared(leaf: Any) -> jax.Array:
    """Return the array of a leaf, integers promoted to the default float."""
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jnp.integer):
        array = array.astype(jnp.result_type(float))
    return checked_dtype(array)


def _with_origin(pair: tuple[np.ndarray, jax.Array]) -> HostArray:
    view, origin = pair
    return replace(HostArray.of(view), origin=origin)


def as_integers(x: jax.Array) -> jax.Array:
    """Return a float32 or bfloat16 array in float64, subnormals too."""
    bits = lax.bitcast_convert_type(x, jnp.uint16 if format_of(x) is BFLOAT16 else jnp.uint32)
    sign_bit = 1 << (8 * x.dtype.itemsize - 1)
    magnitude = (bits & (sign_bit - 1)).astype(jnp.int32)
    below_normal = magnitude.astype(jnp.float64) * format_of(x).step
    below_normal = jnp.where((bits & sign_bit) > 0, -below_normal, below_normal)
    return jnp.where(magnitude < 1 << (format_of(x).precision - 1), below_normal, x.astype(jnp.float64))


def nearest(wide: jax.Array) -> jax.Array:
    """Return non-negative float64 numbers in float32, rounded to nearest, subnormals too."""
    units = jnp.round(jnp.where(wide < FLOAT32.tiny, wide, 0.0) / FLOAT32.step).astype(jnp.int32)
    below_normal = lax.bitcast_convert_type(units, jnp.float32)
    return jnp.where(wide < FLOAT32.tiny, below_normal, wide.astype(jnp.float32))


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
    traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
    return JaxKernels(visible=False) if traced and usable(leaves) else Jax(visible=not traced)


HOST = JaxHost()
