"""Convolutions: the outer products that they add to the gradient of their kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn

from gradclip._src.per_example.ghost.jax_products import Product, counting, is_floating, outer_products
from gradclip._src.per_example.ghost.jax_views import NotFollowedError, Piece, split


def of_convolution(equation: JaxprEqn, piece: Piece, loops: Sequence[int]) -> Product:
    """Return the use of a piece as the kernel of a convolution: one term for each position of the result."""
    settings, (result,) = equation.params, equation.outvars
    inputs, kernel = equation.invars
    numbers, groups = settings["dimension_numbers"], settings["feature_group_count"]
    is_whole = piece.shape == kernel.aval.shape and not any(piece.offset)
    if not is_whole or settings["batch_group_count"] != 1 or not is_floating(inputs, result):
        raise NotFollowedError
    features, channels, *window = (piece.axes[axis] for axis in numbers.rhs_spec)
    blocks, features = split(features, groups)
    rows, *places = counting([result.aval.shape[axis] for axis in (numbers.out_spec[0], *numbers.out_spec[2:])])
    of_result = dict(zip(numbers.out_spec, [rows, (*blocks, *features), *places], strict=True))

    def patches(x: Array) -> Array:
        return _patches(equation, x)

    for _ in loops:
        patches = jax.vmap(patches)
    return outer_products(
        equation.primitive.name,
        piece,
        0,
        loops,
        [rows, (*blocks, *channels), *window, *places],
        [of_result[axis] for axis in range(result.aval.ndim)],
        lambda x, e: (patches(x), e),
    )


def _patches(equation: JaxprEqn, x: Array) -> Array:
    """Return what each element of the kernel is multiplied with: shape (batch, channels, *kernel, *result).

    Each is a slice of the padded input. A convolution with ones would multiply a NaN with zeros.
    """
    settings, numbers = equation.params, equation.params["dimension_numbers"]
    kernel = [equation.invars[1].aval.shape[axis] for axis in numbers.rhs_spec[2:]]
    found = [equation.outvars[0].aval.shape[axis] for axis in numbers.out_spec[2:]]
    strides, steps = settings["window_strides"], settings["rhs_dilation"]
    x = lax.transpose(x, numbers.lhs_spec)
    edges = [(*ends, gap - 1) for ends, gap in zip(settings["padding"], settings["lhs_dilation"], strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *edges])
    slices = []
    for place in product(*map(range, kernel)):
        starts = np.multiply(place, steps)
        stops = starts + np.multiply(np.subtract(found, 1), strides) + 1
        slices.append(lax.slice(x, (0, 0, *starts), (*x.shape[:2], *stops), (1, 1, *strides)))
    return jnp.stack(slices, 2).reshape(*x.shape[:2], *kernel, *found)
