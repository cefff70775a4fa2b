"""Matrix products for norms and sums of factors, in JAX."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradclip._src.backends.jax.products import batch_product, gram_squares, outer_sums, row_squares, widened
from gradclip._src.private.ghost.products import Products, Squares
from gradclip._src.private.ghost.records import Dense, Embedding


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
