"""Weighted sums over a batch, in XLA's code for the CPU, a few examples at a time.

Each example is read once, and no product is stored. XLA by itself would store all products in float64 before adding
them. Examples are rows here and in the calls of the kernels, so XLA chooses one layout for both.

A batch that may be sharded over several devices is not summed this way, because XLA would gather it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from gradclip.backends.jax.axes import varying_alike
from gradclip.core.formats import FLOAT32, format_of

if TYPE_CHECKING:
    from gradclip.core.records import Coefficient

_AT_A_TIME = 4  # the fastest of 1, 4, 8 and 16


def sum_by_rows(x: jax.Array, coefficient: Coefficient, widen: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Multiply each example of a real array by its coefficient, and sum over the first axis in float64."""
    total = _sum_of_rows(as_rows(x, 1), coefficient, widen)
    return total.reshape(x.shape[1:])


def _sum_of_rows(x: jax.Array, coefficient: Coefficient, widen: Callable[[jax.Array], jax.Array]) -> jax.Array:
    weights = coefficient.weights(jnp)
    # Slice half-precision data as integers. Otherwise XLA first copies the whole batch to float32.
    bits = lax.bitcast_convert_type(x, jnp.uint16) if format_of(x).precision < FLOAT32.precision else x

    def plus(total: jax.Array, i: jax.Array | int) -> jax.Array:
        row = lax.dynamic_index_in_dim(bits, i, keepdims=False)
        row = row if bits is x else lax.bitcast_convert_type(row, x.dtype)
        product = widen(row) * weights.first[i]
        product = product if weights.second is None else product * weights.second[i]
        return total + jnp.where(coefficient.blank[i], 0.0, product)

    def body(block: jax.Array, total: jax.Array) -> jax.Array:
        for j in range(_AT_A_TIME):
            total = plus(total, block * _AT_A_TIME + j)
        return total

    blocks = x.shape[0] // _AT_A_TIME
    total, _ = varying_alike(jnp.zeros(x.shape[1:], weights.first.dtype), x)
    total = lax.fori_loop(0, blocks, body, total) if blocks else total
    for i in range(blocks * _AT_A_TIME, x.shape[0]):
        total = plus(total, i)
    return total


def as_rows(x: jax.Array, axes: int) -> jax.Array:
    """Flatten all axes after the first `axes` into one."""
    return x.reshape(*x.shape[:axes], math.prod(x.shape[axes:]))
