"""The backend for MLX arrays on a GPU and under MLX's transformations: nothing here reads a value.

Apple's GPUs have no float64: there all is computed in float32, or on the CPU if an array is float64. The bound rests on
sums, products and quotients that are rounded to nearest. MLX compiles its kernels for Metal, and those of `mx.compile`,
without fast math, where Metal's language promises that. It lets a GPU read subnormal numbers as zero. MLX's CPU code
keeps them, unless the thread that started it flushed. So, on any device, the floor of a norm allows for them, and
results below the normal range are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from gradclip._src.backends.mlx import namespace
from gradclip._src.backends.mlx.derivative import call_differentiably
from gradclip._src.backends.portable import Portable
from gradclip._src.core.arrays import checked_dtype
from gradclip._src.core.formats import FLOAT16, FLOAT32, FLOAT64, Format, format_of, sum_dtype
from gradclip._src.core.layouts import LAYER, Scope
from gradclip._src.core.protocols import Backend
from gradclip._src.core.rules import Into

_PIECE = 1 << 16  # elements whose powers are stored at once, in a cache
_UNITS = 1.0  # of roundoff, by which float32 numbers are lowered before a half type


def on_gpu() -> bool:
    """Say whether MLX computes on a GPU unless it is told otherwise."""
    return mx.default_device().type == mx.gpu


class Lazy(Portable):
    """Arrays whose values are not read."""

    def __init__(self, *, visible: bool, wide: Format) -> None:
        super().__init__(namespace, wide)
        self.divisors_above = wide.tiny
        self.divisors_up_to = 1.0 / wide.tiny
        self.visible = visible

    def flushed_below(self, element: Format) -> float:
        if self.wide is FLOAT32:
            return FLOAT32.tiny
        return 0.0 if element is FLOAT16 else element.tiny

    def precision(self) -> AbstractContextManager[Any]:
        return mx.stream(mx.cpu) if self.wide is FLOAT64 and on_gpu() else nullcontext()

    def prepare(self, leaf: Any) -> mx.array:
        return checked_dtype(array_of(leaf))

    def prepare_in_place(self, leaf: Any) -> mx.array:
        return array_of(leaf)

    def writable(self, leaves: Sequence[Any]) -> bool:
        return False

    def write(self, results: Sequence[mx.array], into: Into) -> list[mx.array]:
        return list(results)

    def leave(self, array: mx.array, leaf: Any) -> mx.array:
        return array

    def leave_sum(self, wide: mx.array, x: mx.array, dtype: str | None) -> mx.array:
        return namespace.astype(wide, sum_dtype(x, wide, dtype))

    def leave_count(self, flags: mx.array, leaves: Sequence[Any]) -> mx.array:
        return mx.sum(flags)

    def leave_scalar(self, value: mx.array, dtype: str, leaves: Sequence[Any]) -> mx.array:
        return namespace.astype(value, dtype)

    def booleans(self, mask: Any) -> mx.array:
        return namespace.asarray(mask, mx.bool_)

    def scalar(self, value: Any, near: Sequence[mx.array]) -> mx.array:
        if isinstance(value, mx.array):
            fits = self.wide is FLOAT64 or value.dtype in (mx.float32, mx.float16, mx.bfloat16)
            return self.widen(value) if fits else _not_above(value)
        known = np.asarray(value, np.float64)
        if self.wide is FLOAT32:
            with np.errstate(over="ignore"):
                nearest = known.astype(np.float32)
            # A threshold must not become larger.
            known = np.where(nearest > known, np.nextafter(nearest, np.float32(0)), nearest)
        return mx.array(known, dtype=self.wide_dtype)

    def widen(self, x: mx.array) -> mx.array:
        with self.precision():
            return x.astype(self.wide_dtype)

    def bits(self, x: mx.array) -> mx.array:
        return namespace.bits(x)

    def from_bits(self, bits: mx.array) -> mx.array:
        return namespace.from_bits(bits)

    def complex(self, real: mx.array, imag: mx.array) -> mx.array:
        return namespace.complex_of(real, imag)

    def largest_of(self, x: mx.array, scope: Scope) -> mx.array:
        return self._or_nan(super().largest_of(x, scope), x, scope)

    def smallest_of(self, x: mx.array, scope: Scope) -> mx.array:
        return self._or_nan(super().smallest_of(x, scope), x, scope)

    def _or_nan(self, found: mx.array, x: mx.array, scope: Scope) -> mx.array:
        # MLX promises no order of NaN. Its CPU code finds one, which tests show.
        if self.wide is FLOAT64:
            return found
        return mx.where(mx.any(mx.isnan(x), axis=scope.shared_axes(x.ndim)), mx.nan, found)

    def narrow(self, x: mx.array, like: mx.array) -> mx.array:
        source, target = format_of(x), format_of(like)
        if source is target or target is FLOAT16:
            return super().narrow(x, like)
        # A conversion may flush numbers below the normal range, or round them up. Make them zero.
        normal = mx.where(mx.abs(x) < target.tiny, x * 0.0, x)
        return self.cut(normal, target).astype(like.dtype)

    def cut(self, x: mx.array, target: Format) -> mx.array:
        if x.dtype == mx.float64 or not x.ndim:  # thresholds become the next smaller number
            return super().cut(x, target)
        # Views of bits would end the compiled loop, and a choice for each element takes longer than all else. By u,
        # a number loses at least half a unit in the last place, so a conversion to nearest does not exceed it
        # (proofs/frameworks.py).
        return x * (1.0 - _UNITS * target.roundoff)

    def not_above(self, product: mx.array) -> mx.array:
        """Return the product, or zero if it is below the normal range, where a device may or may not flush."""
        return mx.where(mx.abs(product) < format_of(product).tiny, product * 0.0, product)

    def power_sum_of(self, x: mx.array, p: float, scope: Scope, divisor: mx.array | None) -> mx.array:
        if self.wide is not FLOAT64 or len(scope.shared_axes(x.ndim)) < x.ndim or x.size <= _PIECE:
            return super().power_sum_of(x, p, scope, divisor)
        pieces = mx.split(x.reshape(-1), range(_PIECE, x.size, _PIECE))
        powers = (super(Lazy, self).power_sum_of(piece, p, LAYER, divisor) for piece in pieces)
        return sum(powers, start=mx.zeros((), self.wide_dtype))

    def scaled(
        self, x: mx.array, keep: mx.array, blank: mx.array, first: mx.array, second: mx.array | None
    ) -> mx.array:
        # `mx.compile` would compute them anew for each element.
        keep, blank, first = map(mx.contiguous, (keep, blank, first))
        return super().scaled(x, keep, blank, first, None if second is None else mx.contiguous(second))

    def clamped(self, x: mx.array, bound: Any) -> mx.array:
        with self.precision():
            return super().clamped(x, bound)

    def differentiable(self, function: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        # Whatever is differentiated is traced.
        return function if self.visible else partial(call_differentiably, function, rule)


_checked: type[Backend] = Lazy


def array_of(leaf: Any) -> mx.array:
    """Return a leaf as an array."""
    return leaf if isinstance(leaf, mx.array) else mx.array(leaf)


def _not_above(value: mx.array) -> mx.array:
    """Convert float64 numbers or integers to float32, not rounded up."""
    with mx.stream(mx.cpu):
        value = value.astype(mx.float64)
        nearest = value.astype(mx.float32)
        return mx.where(nearest > value, namespace.from_bits(namespace.bits(nearest) - 1), nearest)
