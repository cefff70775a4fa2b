"""Traced JAX arrays on the CPU, reduced by the kernels, which XLA's compiled code calls."""

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradclip.backends.arrays import Arrays
from gradclip.backends.formats import is_complex
from gradclip.backends.jax_axes import varying_together
from gradclip.backends.jax_ffi import add_examples, entries, extremes, power_sums
from gradclip.backends.jax_traced import Jax
from gradclip.backends.portable import ENOUGH


class JaxKernels(Jax):
    """Traced arrays on the CPU, read by the kernels, which know subnormal numbers."""

    splits_by_range = False

    def sum_error(self, count: int, arrays: Arrays, p: float, *, batched: bool = False) -> float:
        return self.kernels_sum_error(count, arrays, p)

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

    def together(self, arrays: Sequence[Any]) -> Hashable | None:
        # A vector of what varies over different axes would vary over all of them.
        return varying_together(arrays)

    def stacked(self, scalars: Sequence[jax.Array]) -> jax.Array:
        return lax.concatenate([lax.broadcast(x, (1,)) for x in scalars], 0)

    def unstacked(self, vectors: Sequence[jax.Array]) -> list[list[jax.Array]]:
        return entries(vectors)

    def add_examples(self, arrays: Arrays, weighing: Any, mask: Any) -> tuple[list[jax.Array], jax.Array]:
        # Without a derivative: it is called inside of rules that have one.
        included = jnp.zeros(arrays[0].shape[0]) if mask is None else jnp.where(mask, 0.0, jnp.nan)
        numbers = jnp.stack([jnp.asarray(number, jnp.float64) for number in weighing])
        widths = [math.prod(x.shape[1:]) * (2 if is_complex(x) else 1) for x in arrays]
        squares, totals = add_examples(list(arrays), numbers, included, sum(widths))
        ends = itertools.accumulate(widths)
        sums = [summed(totals[end - n : end], x) for n, end, x in zip(widths, ends, arrays, strict=True)]
        return sums, jnp.where(jnp.isnan(included), 0.0, squares)

    def _read(self, reduce: Callable[..., Any], portable: Callable[..., Any], arrays: Arrays) -> Any:
        """Return what the kernels make of the arrays; it changes with them as what XLA's own operations would."""
        read = jax.custom_jvp(reduce)

        @read.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            result = read(*primals)
            with self.precision():
                return result, jax.jvp(lambda arrays: portable(Arrays(arrays), result), primals, tangents)[1]

        return read(list(arrays))


def summed(numbers: jax.Array, like: jax.Array) -> jax.Array:
    """Return the sum over examples of `like`, whose numbers, of complex ones the parts in turn, these are."""
    wide = lax.complex(numbers[::2], numbers[1::2]) if is_complex(like) else numbers
    return wide.reshape(like.shape[1:])


def rows_of(arrays: Arrays, batched: bool) -> tuple[int, ...]:
    """Return the shape of results that are one number for each example, or one for all."""
    return arrays[0].shape[: int(batched)]
