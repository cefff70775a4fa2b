"""Gradients in factors for tests: random numbers of many kinds, and what they are in exact arithmetic."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradclip._src.private.ghost.jax.matrices import JaxProducts
from gradclip._src.private.ghost.records import Dense, Embedding, Made, MatrixPlace, PlacedTerms
from gradclip._src.private.ghost.torch.matrices import TorchProducts

PRODUCTS = {"jax": JaxProducts, "torch": TorchProducts}
DTYPES = ["float16", "bfloat16", "float32", "float64"]
KINDS = ["ordinary", "mixed", "huge", "tiny", "cancelling"]


def place_of(rows, columns):
    return MatrixPlace((0, 0), (rows, columns), (rows, columns), (), (0,), (1,))


def array(framework, values, dtype):
    wide = np.asarray(values)
    if framework == "torch":
        return torch.tensor(wide).to(getattr(torch, dtype))
    with jax.enable_x64(True):
        return jnp.asarray(wide).astype(dtype)


def numbers(kind, shape, rng, dtype):
    """Return numbers of a kind. Axis -2 are the terms: cancelling, each second one takes the one before it away."""
    x = rng.standard_normal(shape)
    reach = {"float16": 3, "bfloat16": 30, "float32": 30, "float64": 60}[dtype]
    if kind == "mixed":
        return x * 10.0 ** rng.uniform(-reach, reach, shape)
    if kind == "cancelling":
        pairs = shape[-2] // 2 * 2
        last = {"float16": 2.0**-9, "bfloat16": 2.0**-6}.get(dtype, 2.0**-20)
        x[..., 1:pairs:2, :] = -x[..., 0:pairs:2, :] * (1 + last)
        return x
    return x * {"huge": 10.0**reach, "tiny": 10.0**-reach}.get(kind, 1.0)


def wide(x):
    """Return an array's numbers as NumPy's float64, exactly."""
    return np.asarray(x.double() if isinstance(x, torch.Tensor) else np.asarray(x).astype(np.float64))


def exact(gradient):
    """Return the gradient of each example as a list of its elements, as fractions."""
    if isinstance(gradient, Made):
        return [[Fraction(float(v)) for v in row] for row in wide(gradient.rows).reshape(len(gradient.rows), -1)]
    (part,) = gradient
    _, rows, columns = part.place.shape
    found = []
    for example in range(len(part.terms[0].right)):
        matrix = [[Fraction(0)] * columns for _ in range(rows)]
        for terms in part.terms:
            _add(matrix, terms, example)
        found.append([x for row in matrix for x in row])
    return found


def _add(matrix, terms, example):
    if isinstance(terms, Embedding):
        for index, right in zip(np.asarray(terms.indices)[example], wide(terms.right)[example], strict=True):
            matrix[index] = [x + Fraction(float(y)) for x, y in zip(matrix[index], right, strict=True)]
        return
    for left, right in zip(wide(terms.left)[example, 0], wide(terms.right)[example, 0], strict=True):
        for i, x in enumerate(left):
            for j, y in enumerate(right):
                matrix[i][j] += Fraction(float(x)) * Fraction(float(y))


def square(elements):
    """Return the exact square of a norm."""
    return sum(x * x for x in elements)


def gradient(framework, structure, kind, dtype, examples, terms, seed=0):
    """Return a gradient of 3 x 2 elements: a "product", an "embedding", both ("tied"), or "made"."""
    rng = np.random.default_rng(seed)
    if structure == "made":
        return Made(array(framework, numbers(kind, (examples, 3, 2), rng, dtype), dtype))
    found = []
    if structure in ("product", "tied"):
        sides = [numbers(kind, (examples, 1, terms, n), rng, dtype) for n in (3, 2)]
        if kind == "cancelling":  # one side changes its sign, the other hardly
            sides[0] = np.abs(sides[0])
        found.append(Dense(*(array(framework, x, dtype) for x in sides)))
    if structure in ("embedding", "tied"):
        indices = rng.integers(3, size=(examples, terms)).astype(np.int32)
        indices[:, 1::2] = indices[:, 0 : terms // 2 * 2 : 2] if kind == "cancelling" else indices[:, 1::2]
        right = array(framework, numbers(kind, (examples, terms, 2), rng, dtype), dtype)
        found.append(Embedding(torch.tensor(indices) if framework == "torch" else jnp.asarray(indices), right))
    return [PlacedTerms(place_of(3, 2), found)]
