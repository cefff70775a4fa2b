"""Norms from factors are at least the exact norms, and hardly more."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradclip.per_example.ghost.measure import measured, norm_of, scaled
from gradclip.per_example.ghost.products_jax import JaxProducts
from gradclip.per_example.ghost.products_torch import TorchProducts
from gradclip.per_example.ghost.records import Dense, Made, Part, Place, Rows

FRAMEWORKS = ["jax", "torch"]
DTYPES = ["float16", "bfloat16", "float32", "float64"]
PLACE = Place((0, 0), (3, 2), (3, 2), (), (0,), (1,))


def place_of(rows, columns):
    return Place((0, 0), (rows, columns), (rows, columns), (), (0,), (1,))


def array(framework, values, dtype):
    wide = np.asarray(values, np.float64)
    if framework == "torch":
        return torch.tensor(wide).to(getattr(torch, dtype))
    with jax.enable_x64(True):
        return jnp.asarray(wide).astype(dtype)


def exact(x):
    """Return an array's numbers as fractions, in nested lists."""
    wide = np.asarray(x.double() if isinstance(x, torch.Tensor) else np.asarray(x).astype(np.float64))
    return [[[Fraction(float(v)) for v in row] for row in one] for one in wide.reshape(-1, *wide.shape[-2:])]


def exact_squares(lefts, rights):
    """Return the exact square of the norm of each example's sum of outer products."""
    found = []
    for left, right in zip(lefts, rights, strict=True):
        matrix = [[Fraction(0)] * len(right[0]) for _ in left[0]]
        for a, e in zip(left, right, strict=True):
            for i, x in enumerate(a):
                for j, y in enumerate(e):
                    matrix[i][j] += x * y
        found.append(sum(x * x for row in matrix for x in row))
    return found


def upper_squares(framework, gradients):
    """Return the exact squares of the norms from above that are used, and the numbers of about norms."""
    products = {"jax": JaxProducts, "torch": TorchProducts}[framework](concrete=True)
    with jax.enable_x64(True):
        above, about = norm_of(products, [measured(products, scaled(products, g)) for g in gradients])
    value = np.asarray(above.value, np.float64)
    divisor = np.ones_like(value) if above.divisor is None else np.asarray(above.divisor, np.float64)
    uppers = [Fraction(float(v)) * Fraction(float(d)) for v, d in zip(value, divisor, strict=True)]
    return [(u / (1 - Fraction(above.error))) ** 2 for u in uppers], about


def numbers(kind, shape, rng, dtype):
    """Return numbers of a kind: ordinary, of mixed magnitudes, huge, tiny, or cancelling over the terms."""
    x = rng.standard_normal(shape)
    reach = {"float16": 3, "bfloat16": 30, "float32": 30, "float64": 120}[dtype]
    if kind == "mixed":
        return x * 10.0 ** rng.uniform(-reach, reach, shape)
    if kind == "huge":
        return x * 10.0**reach
    if kind == "tiny":
        return x * 10.0**-reach
    return x


@pytest.mark.parametrize("kind", ["ordinary", "mixed", "huge", "tiny", "cancelling"])
@pytest.mark.parametrize("terms", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_norm_from_above_is_at_least_the_exact_norm(framework, dtype, terms, kind):
    rng = np.random.default_rng(terms)
    left, right = numbers(kind, (6, 1, terms, 3), rng, dtype), numbers(kind, (6, 1, terms, 2), rng, dtype)
    if kind == "cancelling" and terms > 1:
        # The second term takes the first away, but for the last bit.
        left[:, :, 1], right[:, :, 1] = left[:, :, 0], -right[:, :, 0] * (1 + 2.0**-20)
    left, right = array(framework, left, dtype), array(framework, right, dtype)
    squares = exact_squares(exact(left[:, 0]), exact(right[:, 0]))
    uppers, _ = upper_squares(framework, [[Part(PLACE, [Dense(left, right)])]])
    assert all(upper >= square for upper, square in zip(uppers, squares, strict=True))
    if kind in ("ordinary", "huge", "tiny"):
        assert all(upper <= square * Fraction(1001, 1000) for upper, square in zip(uppers, squares, strict=True) if square)
