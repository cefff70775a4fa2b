"""Weighted sums of outer products, and norms of such sums from inner products, in float64, in programs for XLA.

All widen what they get to float64 exactly, and can be called in 32-bit mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradclip._src import native
from gradclip._src.backends.jax.ffi import Kernel, usable
from gradclip._src.backends.jax.kernels import power_sums
from gradclip._src.backends.jax.operations import FLUSHED, as_integers
from gradclip._src.core.formats import format_of


def outer_sums(left: jax.Array | None, right: jax.Array, weights: jax.Array) -> jax.Array:
    """Return sum_k weight_k left[g, k]^T right[g, k], float64 (blocks, rows, columns).

    `left` (blocks, K, rows) and `right` (blocks, K, columns) have any real dtypes; None stands for ones with one row.
    `weights` (examples,) are float64, each for K / examples of the k. A k with weight 0 adds nothing, whatever its rows
    hold. A term goes through at most K + 2 roundings.
    """
    blocks, depth, columns = right.shape
    rows = 1 if left is None else left.shape[2]
    if (left is not None and left.shape[:2] != (blocks, depth)) or (
        depth and (not len(weights) or depth % len(weights))
    ):
        raise ValueError(
            f"left must be (blocks, K, rows), right (blocks, K, columns), with K a multiple of the number of weights; "
            f"got {None if left is None else left.shape}, {right.shape} and {weights.shape[0]} weights"
        )
    shape = blocks, rows, columns
    with _wide():
        if not blocks * depth * rows * columns:
            return jnp.zeros(shape, jnp.float64)
        sides = [right] if left is None else [left, right]
        return _call("outer_sums", [*sides, weights.astype(jnp.float64)], [shape], _outer_sums)[0]


def gram_squares(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return |sum_t left[n, t]^T right[n, t]|^2 and sum_t |left[n, t]| |right[n, t]| for each n, in float64.

    `left` is (N, T, rows), `right` (N, T, columns), of any real dtypes. Both results are NaN where an element is not
    finite. `native/gram.hpp` has the error bounds, which hold for XLA's operations too.
    """
    if left.shape[:2] != right.shape[:2]:
        raise ValueError(f"left must be (N, T, rows) and right (N, T, columns), got {left.shape} and {right.shape}")
    shape = (left.shape[0],)
    with _wide():
        if not left.size or not right.size:
            return jnp.zeros(shape, jnp.float64), jnp.zeros(shape, jnp.float64)
        squares, sizes = _call("gram_squares", [left, right], [shape, shape], _gram_squares)
        return squares, sizes


def row_squares(x: jax.Array) -> jax.Array:
    """Return the sum of squares over the last axis in float64; NaN or infinite where an element is not finite."""
    with _wide():
        if not usable([x]):
            return jnp.sum(jnp.square(widened(x)), -1)
        # Of halves alone, the kernel would add some squares in float32.
        other = jnp.zeros((*x.shape[:-1], 0), jnp.float32)
        return power_sums([x, other], 2.0, -1.0, x.shape[:-1])[0]


@contextmanager
def _wide() -> Iterator[None]:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def _call(name: str, arrays: list[jax.Array], shapes: list[tuple[int, ...]], portable: Any) -> Any:
    if not usable(arrays) or not native.kernels.fuses():
        return portable(arrays, shapes[0])
    results = tuple(jax.ShapeDtypeStruct(shape, jnp.float64) for shape in shapes)
    threads = "threads", np.int64(native.default_threads())
    return Kernel(f"gradclip_{name}", results, portable, "loop", (threads,))(arrays)


def _outer_sums(arrays: list[jax.Array], shape: tuple[int, ...], **threads: int) -> list[jax.Array]:
    *sides, weights = arrays
    of_rows = jnp.repeat(weights, sides[0].shape[1] // weights.shape[0])[None, :, None]
    # Zero times what a row of weight 0 holds may be NaN.
    *left, right = (jnp.where(of_rows == 0, 0.0, widened(x)) for x in sides)
    weighted = left[0] * of_rows if left else jnp.broadcast_to(of_rows, (*right.shape[:2], 1))
    return [batch_product(weighted, right, contracted=1)]


def _gram_squares(arrays: list[jax.Array], shape: tuple[int, ...], **threads: int) -> list[jax.Array]:
    left, right = map(widened, arrays)
    squares = jnp.sum(batch_product(left, left, contracted=2) * batch_product(right, right, contracted=2), (1, 2))
    sizes = jnp.sum(jnp.sqrt(jnp.sum(left * left, -1)) * jnp.sqrt(jnp.sum(right * right, -1)), -1)
    finite = jnp.isfinite(squares) & jnp.isfinite(sizes)
    return [jnp.where(finite, squares, jnp.nan), jnp.where(finite, sizes, jnp.nan)]


def batch_product(x: jax.Array, y: jax.Array, *, contracted: int) -> jax.Array:
    """Return the products of the matrices of a batch on axis 0, over one axis of both, in their dtype."""
    # With a dtype of the result, as `jnp.einsum` gives it, `jax.vmap` computes float64 in float32 in 32-bit mode.
    axes = ((contracted,), (contracted,)), ((0,), (0,))
    return lax.dot_general(x, y, axes, precision=lax.Precision.HIGHEST)


def widened(x: jax.Array) -> jax.Array:
    """Return an array in float64, exactly."""
    # A convert in XLA's code for the CPU reads subnormal numbers as zeros.
    return as_integers(x) if format_of(x) in FLUSHED else x.astype(jnp.float64)
