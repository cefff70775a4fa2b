"""Reductions of traced JAX arrays on the CPU. XLA's compiled code calls gradclip's kernels for them.

One call reads all arrays of a norm, without copies. Under `vmap` there is still one call: the arrays get a leading
axis, and each of its rows has a norm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradclip._src import native
from gradclip._src.backends.jax import exported
from gradclip._src.backends.jax.ffi import Kernel
from gradclip._src.backends.jax.placement import varying_together
from gradclip._src.backends.jax.traced import JaxTraced
from gradclip._src.backends.sums import ENOUGH, examples_sum_error, kernels_sum_error
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import FLOAT64, Format, is_complex
from gradclip._src.core.layouts import Scope
from gradclip._src.core.protocols import Backend

if TYPE_CHECKING:
    from gradclip._src.core.rules import Rule


class JaxKernels(JaxTraced):
    """The backend for traced arrays on the CPU. Its kernels read subnormal numbers correctly."""

    splits_by_range = False

    def sum_error(self, count: int, arrays: Arrays, p: float, scope: Scope) -> float:
        return kernels_sum_error(count, arrays.only_halves, p)

    def flushed_below(self, element: Format) -> float:
        # What XLA computes with a norm is float64.
        return element.tiny if element is FLOAT64 else 0.0

    def one_reduction(self) -> bool:
        return False  # only derivatives are left to XLA's sums

    def power_sum(self, arrays: Arrays, p: float, scope: Scope, divisor: jax.Array | None = None) -> jax.Array:
        # Every finite sum is above -1, so the kernels repeat none of them with a divisor.
        return self._power_sums(arrays, p, -1.0, scope)[0]

    def scaled_power_sum(self, arrays: Arrays, p: float, scope: Scope) -> tuple[jax.Array, jax.Array]:
        # No sum is above infinity: for other orders, the kernels always divide by the largest magnitude.
        return self._power_sums(arrays, p, ENOUGH if p in (1, 2) else math.inf, scope)

    def _power_sums(self, arrays: Arrays, p: float, enough: float, scope: Scope) -> tuple[jax.Array, jax.Array]:
        def portable(arrays: Arrays, result: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return super(JaxKernels, self).power_sum(arrays, p, scope, result[1]), result[1]

        rows = scope.norms_shape(arrays[0].shape)
        return self._read(lambda arrays: power_sums(rows_first(arrays, scope), p, enough, rows), portable, arrays)

    def largest(self, arrays: Arrays, scope: Scope) -> jax.Array:
        return self._extreme(0, super().largest, arrays, scope)

    def smallest(self, arrays: Arrays, scope: Scope) -> jax.Array:
        return self._extreme(1, super().smallest, arrays, scope)

    def _extreme(self, index: int, portable: Callable[..., Any], arrays: Arrays, scope: Scope) -> jax.Array:
        rows = scope.norms_shape(arrays[0].shape)
        return self._read(
            lambda arrays: extremes(rows_first(arrays, scope), rows)[index],
            lambda arrays, _: portable(arrays, scope),
            arrays,
        )

    def vectorisable_with(self, arrays: Sequence[Any]) -> Hashable | None:
        # If scalars that vary over different mesh axes were put in one vector, it would vary over all these axes.
        return varying_together(arrays)

    def stacked(self, scalars: Sequence[jax.Array]) -> jax.Array:
        return lax.concatenate([lax.broadcast(x, (1,)) for x in scalars], 0)

    def unstacked(self, vectors: Sequence[jax.Array]) -> list[list[jax.Array]]:
        return entries(vectors)

    def examples_error(self, arrays: Arrays, count: int) -> float | None:
        return None if FLOAT64 in arrays.formats else examples_sum_error(count)

    def add_examples(
        self, arrays: Arrays, weighing: Rule, mask: jax.Array | None, *, spoil: bool
    ) -> tuple[list[jax.Array], jax.Array] | None:
        if spoil:
            return None
        # This needs no derivative: it is only called inside functions that have a derivative rule.
        # NaN marks an example as left out. The kernel copies the marks into its vector of sums of squares.
        included = jnp.zeros(arrays[0].shape[0]) if mask is None else jnp.where(mask, 0.0, jnp.nan)
        numbers = jnp.stack([jnp.asarray(number, jnp.float64) for number in weighing])
        widths = [math.prod(x.shape[1:]) * (2 if is_complex(x) else 1) for x in arrays]
        squares, totals = add_examples(list(arrays), numbers, included, sum(widths))
        ends = itertools.accumulate(widths)
        sums = [summed(totals[end - n : end], x) for n, end, x in zip(widths, ends, arrays, strict=True)]
        return sums, jnp.sqrt(jnp.where(jnp.isnan(included), 0.0, squares))

    def _read(self, reduce: Callable[..., Any], portable: Callable[..., Any], arrays: Arrays) -> Any:
        """Reduce the arrays with the kernels. The derivative is that of the portable operations."""
        # JAX cannot differentiate a kernel, so this rule differentiates the portable operations instead.
        read = jax.custom_jvp(reduce)

        @read.defjvp
        def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
            # Call `read`, not `reduce`: second derivatives then use this rule too.
            result = read(*primals)
            with self.precision():
                return result, jax.jvp(lambda arrays: portable(Arrays(arrays), result), primals, tangents)[1]

        return read(list(arrays))


_checked: type[Backend] = JaxKernels


def summed(numbers: jax.Array, like: jax.Array) -> jax.Array:
    """Reshape a flat sum to the shape of one example. Complex sums alternate real and imaginary parts."""
    wide = lax.complex(numbers[::2], numbers[1::2]) if is_complex(like) else numbers
    return wide.reshape(like.shape[1:])


def rows_first(arrays: Sequence[jax.Array], scope: Scope) -> list[jax.Array]:
    """Move the axes with separate norms to the front of each array, as the kernels expect."""
    axes = [(*scope.own_axes(x.ndim), *scope.shared_axes(x.ndim)) for x in arrays]
    return list(map(lax.transpose, arrays, axes))


def power_sums(
    arrays: Sequence[jax.Array], p: float, enough: float, rows: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return the sum of (|x| / divisor)**p over all arrays, and the divisor, for each row of the leading axes `rows`.

    The divisor is 1 if the sum is then finite and above `enough`. Otherwise it is the largest magnitude.
    """
    attributes = ("p", np.float64(p)), ("enough", np.float64(enough))
    total, divisor = _reduction("gradclip_power_sums", rows, exported.power_sums, *attributes)(arrays)
    return total, divisor


def extremes(arrays: Sequence[jax.Array], rows: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the largest magnitude (NaN if one is NaN) and the smallest (NaN if one is non-finite)."""
    largest, smallest = _reduction("gradclip_extremes", rows, exported.extremes)(arrays)
    return largest, smallest


# Sequential mapping is a loop. Outside traced code, only a jitted function keeps its program for the next call.
@partial(jax.jit, static_argnames="columns", inline=True)
def add_examples(
    arrays: Sequence[jax.Array], weighing: jax.Array, included: jax.Array, columns: int
) -> tuple[jax.Array, jax.Array]:
    """Return each example's sum of squares, and the `columns` weighted sums over the examples."""
    wide = jax.ShapeDtypeStruct(included.shape, jnp.float64), jax.ShapeDtypeStruct((columns,), jnp.float64)
    # In a loop under `vmap`: the kernel does not support a second batch axis.
    kernel = Kernel("gradclip_add_examples", wide, exported.add_examples, "loop", (_threads(),))
    squares, totals = kernel([weighing, included, *arrays])
    return squares, totals


def entries(vectors: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Split vectors into scalars. XLA then compiles the code that uses them once for all of them."""
    scalars = tuple(jax.ShapeDtypeStruct((), vector.dtype) for vector in vectors for _ in range(vector.shape[0]))
    found = iter(Kernel("gradclip_entries", scalars, exported.entries, "broadcast")(vectors))
    return [list(itertools.islice(found, vector.shape[0])) for vector in vectors]


def _reduction(
    target: str, rows: tuple[int, ...], portable: Callable[..., Any], *attributes: tuple[str, Any]
) -> Kernel:
    wide = jax.ShapeDtypeStruct(rows, jnp.float64)
    # The rows of all arrays agree or broadcast.
    return Kernel(target, (wide, wide), portable, "expand", (_threads(), *attributes))


def _threads() -> tuple[str, Any]:
    return "threads", np.int64(native.default_threads())
