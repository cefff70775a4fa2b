"""Matrix products for norms and sums of factors, in JAX, in programs for XLA.

All widen what they get to float64 exactly, and can be called in 32-bit mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from gradclip._src.private.ghost.records import Dense, Embedding
from gradclip._src.private.ghost.taps import Products, Squares


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


class JaxProducts(Products):
    """`Products` for JAX. They need 64-bit mode."""

    xp = jnp

    def __init__(self, *, concrete: bool) -> None:
        self.concrete = concrete

    @contextmanager
    def precision(self) -> Iterator[None]:
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            yield

    def dense(self, terms: Dense) -> Squares:
        batch, blocks = terms.left.shape[:2]
        squares, sizes = gram_squares(*(x.reshape(batch * blocks, *x.shape[2:]) for x in terms))
        return Squares(squares.reshape(batch, blocks).sum(1), (sizes * sizes).reshape(batch, blocks).sum(1))

    def embedding(self, terms: Embedding) -> Squares:
        right = widened(terms.right)
        gram = batch_product(right, right, contracted=2)
        same = terms.indices[:, :, None] == terms.indices[:, None, :]
        sizes = jnp.sqrt(row_squares(terms.right)).sum(1)
        # NaN among the terms counts even where no two indices agree: each term agrees with itself.
        return Squares(jnp.where(same, gram, 0.0).sum((1, 2)), sizes * sizes)

    def between(self, dense: Dense, rows: Embedding) -> jax.Array:
        gram = batch_product(widened(rows.right), widened(dense.right[:, 0]), contracted=2)
        entries = jnp.take_along_axis(dense.left[:, 0], rows.indices[:, None, :], axis=2)  # (batch, s, t)
        return (gram * widened(entries.swapaxes(1, 2))).sum((1, 2))

    def made(self, rows: jax.Array) -> jax.Array:
        return row_squares(rows.reshape(len(rows), -1))

    def multiplied(self, terms: Dense) -> jax.Array:
        wide = jnp.promote_types(jnp.result_type(*terms), jnp.float32)
        return jnp.einsum("igtr,igtc->igrc", *terms, preferred_element_type=wide)

    def joined(self, terms: Sequence[Dense]) -> Dense:
        return terms[0] if len(terms) == 1 else Dense(*(jnp.concatenate(x, axis=2) for x in zip(*terms, strict=True)))

    def joined_rows(self, terms: Sequence[Embedding]) -> Embedding:
        return terms[0] if len(terms) == 1 else Embedding(*(jnp.concatenate(x, 1) for x in zip(*terms, strict=True)))

    def exponents(self, x: jax.Array) -> jax.Array:
        largest = jnp.abs(widened(x)).max(tuple(range(1, x.ndim)), initial=0.0)
        # `frexp` reads the bits, so it also sees subnormal numbers that arithmetic may flush.
        return jnp.where(jnp.isfinite(largest), jnp.frexp(largest)[1], 0).astype(jnp.float64)

    def times_power(self, x: jax.Array, exponents: jax.Array) -> jax.Array:
        k = exponents.reshape(-1, *[1] * (x.ndim - 1))
        product = widened(x)
        # Each factor is a normal number, whatever the exponent.
        for part in _in_thirds(k):
            product = product * jnp.ldexp(1.0, part.astype(jnp.int32))
        return product

    def sum_dense(self, terms: Dense, weights: jax.Array) -> jax.Array:
        left, right = (x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3]) for x in terms)
        return outer_sums(left, right, weights)

    def sum_rows(self, terms: Embedding, weights: jax.Array, rows: int) -> jax.Array:
        weighed = _weighed(terms.right, weights)
        columns = weighed.shape[-1]
        total = jnp.zeros((rows, columns), jnp.float64)
        return total.at[terms.indices.reshape(-1)].add(weighed.reshape(-1, columns), mode="drop")[None]

    def sum_made(self, rows: jax.Array, weights: jax.Array) -> jax.Array:
        return outer_sums(None, rows.reshape(1, len(rows), -1), weights).reshape(rows.shape[1:])

    def placed(self, part: jax.Array, view: tuple[int, ...], order: tuple[int, ...], box: tuple[int, ...]) -> jax.Array:
        return part.reshape([view[axis] for axis in order]).transpose(np.argsort(order)).reshape(box)

    def put(self, part: jax.Array, start: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
        if part.shape == shape:
            return part
        # `jax.vmap` cannot compile an update at places that 64-bit mode made.
        edges = [(a, size - a - own, 0) for a, size, own in zip(start, shape, part.shape, strict=True)]
        return lax.pad(part, jnp.zeros((), part.dtype), edges)

    def rounded(self, total: jax.Array, dtype: str) -> jax.Array:
        return total.astype(dtype)

    def after(self, vector: jax.Array, other: jax.Array) -> jax.Array:
        if not other.size:
            return vector
        # XLA drops barriers on processors. It does not see that this number is always 0.
        first = lax.bitcast_convert_type(other.reshape(-1)[:1].astype(jnp.float32), jnp.int32)
        zero = lax.clamp(jnp.int32(0), first, jnp.int32(0))
        return jnp.where(zero == 0, vector, 0.0)

    def given(self, vector: jax.Array) -> jax.Array:
        return np.asarray(vector) if self.concrete else vector

    def taken(self, vector: jax.Array) -> jax.Array:
        return jnp.asarray(vector)


def _weighed(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Return each example times its weight; 0 for weight 0, whatever it holds."""
    by = weights.reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(by == 0, 0.0, widened(x) * by)


def _in_thirds(k: jax.Array) -> list[jax.Array]:
    third = jnp.trunc(k / 3)
    return [third, third, k - 2 * third]
