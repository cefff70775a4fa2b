"""Norms from factors are at least the exact norms, and hardly more."""

from fractions import Fraction

import jax
import numpy as np
import pytest

from factors import DTYPES, KINDS, PRODUCTS, array, exact, gradient, square
from gradclip.per_example.ghost.measure import measured, norm_of, scaled
from gradclip.per_example.ghost.records import Dense, Part, Place

EXAMPLES = 6


def squares_from_above(framework, gradients):
    """Return the square of what the norm of each example may be at most, and about, as fractions."""
    products = PRODUCTS[framework](concrete=True)
    with jax.enable_x64(True):
        above, about = norm_of(products, [measured(products, scaled(products, one)) for one in gradients])
        return [[one * one for one in norms_of(norm)] for norm in (above, about)]


def norms_of(norm):
    values = np.asarray(norm.value, np.float64)
    divisors = np.ones_like(values) if norm.divisor is None else np.asarray(norm.divisor, np.float64)
    pairs = zip(values, divisors, strict=True)
    return [Fraction(float(v)) * Fraction(float(d)) / (1 - Fraction(norm.error)) for v, d in pairs]


@pytest.mark.every_case
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("terms", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("structure", ["product", "embedding", "tied", "made"])
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_the_norm_from_above_is_at_least_the_exact_norm(framework, structure, dtype, terms, kind):
    given = gradient(framework, structure, kind, dtype, EXAMPLES, terms)
    found = list(map(square, exact(given)))
    above, _ = squares_from_above(framework, [given])
    assert all(upper >= one for upper, one in zip(above, found, strict=True))
    if kind in ("ordinary", "huge", "tiny"):
        assert all(upper <= one * Fraction(1001, 1000) for upper, one in zip(above, found, strict=True))


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_several_parameters_share_a_norm(framework):
    kinds = [("product", "huge", "float64"), ("tied", "tiny", "float32"), ("made", "ordinary", "float64")]
    gradients = [gradient(framework, structure, kind, dtype, EXAMPLES, 3) for structure, kind, dtype in kinds]
    found = [sum(map(square, of_example)) for of_example in zip(*map(exact, gradients), strict=True)]
    above, about = squares_from_above(framework, gradients)
    assert all(one <= upper <= one * Fraction(10001, 10000) for upper, one in zip(above, found, strict=True))
    assert all(abs(near - one) <= one / 10**9 for near, one in zip(about, found, strict=True))


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_terms_that_cancel_raise_the_norm(framework):
    given = gradient(framework, "product", "cancelling", "float32", EXAMPLES, 2)
    above, _ = squares_from_above(framework, [given])
    # The gradient is 2**-20 of its terms, and the norm is raised by as much: without it, no sum would have a bound.
    assert all(upper > 2 * one for upper, one in zip(above, map(square, exact(given)), strict=True))


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_norms_leave_room_for_the_additions_of_blocks_and_parts(framework):
    blocks = 3000
    sides = [array(framework, np.ones((1, blocks, 1, 1)), "float32") for _ in range(2)]
    parts = [
        Part(Place((at, 0, 0), (at + blocks, 1, 1), (blocks, 1, 1), (0,), (1,), (2,)), [Dense(*sides)])
        for at in (0, blocks)
    ]
    ((upper,), _) = squares_from_above(framework, [parts])
    assert upper / (2 * blocks) >= 1 + 2 * blocks * Fraction(1, 2**53)
