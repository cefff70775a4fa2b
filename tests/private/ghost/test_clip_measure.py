"""Norms from factors are at least the exact norms, and hardly more."""

from fractions import Fraction
from functools import cache
from itertools import product

import jax
import numpy as np
import pytest

from factors import DTYPES, KINDS, PRODUCTS, array, exact, gradient, square
from gradclip._src.core.norms import Norm
from gradclip._src.private.ghost.clip import measured, norm_of, scaled
from gradclip._src.private.ghost.records import Dense, Made, MatrixPlace, PlacedTerms

EXAMPLES = 6
STRUCTURES = ["product", "embedding", "tied", "made"]
TERMS = [1, 2, 5]


def measured_norms(products, gradients):
    return norm_of(products, [measured(products, scaled(products, one)) for one in gradients])


def squares_from_above(framework, gradients):
    """Return the square of what the norm of each example may be at most, and about, as fractions."""
    with jax.enable_x64(True):
        return squares(measured_norms(PRODUCTS[framework](concrete=True), gradients))


def squares(norms):
    return [[one * one for one in norms_of(norm)] for norm in norms]


def compiled_squares(gradients):
    """Return the same in JAX, by a program that is compiled once for each structure, shape and dtype."""
    places = tuple(None if isinstance(one, Made) else tuple(part.place for part in one) for one in gradients)
    terms = [one if isinstance(one, Made) else [part.terms for part in one] for one in gradients]
    program, errors = compiled(places)
    with jax.enable_x64(True):
        pairs = zip(program(terms), errors, strict=True)
        return squares([Norm(value, divisor, error, 0.0) for (value, divisor), error in pairs])


@cache
def compiled(places):
    errors = []

    @jax.jit
    def program(terms):
        pairs = zip(places, terms, strict=True)
        given = [one if where is None else list(map(PlacedTerms, where, one)) for where, one in pairs]
        norms = measured_norms(PRODUCTS["jax"](concrete=False), given)
        errors[:] = [norm.error for norm in norms]
        return [(norm.value, norm.divisor) for norm in norms]

    return program, errors


def norms_of(norm):
    values = np.asarray(norm.value, np.float64)
    divisors = np.ones_like(values) if norm.divisor is None else np.asarray(norm.divisor, np.float64)
    pairs = zip(values, divisors, strict=True)
    return [Fraction(float(v)) * Fraction(float(d)) / (1 - Fraction(norm.error)) for v, d in pairs]


def cases():
    """Yield all cases in PyTorch, which compiles nothing, and in JAX every pair of structure, dtype and terms."""
    for (i, structure), (j, dtype), (k, terms) in product(*map(enumerate, (STRUCTURES, DTYPES, TERMS))):
        yield "torch", structure, dtype, terms
        if (i + j) % len(TERMS) == k:
            yield "jax", structure, dtype, terms


@pytest.mark.every_case
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("framework", "structure", "dtype", "terms"), list(cases()))
def test_the_norm_from_above_is_at_least_the_exact_norm(framework, structure, dtype, terms, kind):
    given = gradient(framework, structure, kind, dtype, EXAMPLES, terms)
    found = list(map(square, exact(given)))
    if framework == "jax":
        above, _ = compiled_squares([given])
    else:
        above, _ = squares_from_above(framework, [given])
    assert all(upper >= one for upper, one in zip(above, found, strict=True))
    if kind in ("ordinary", "huge", "tiny"):
        assert all(upper <= one * Fraction(1001, 1000) for upper, one in zip(above, found, strict=True))


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_several_parameters_share_a_norm(framework):
    kinds = [("product", "huge", "float64"), ("tied", "tiny", "float32"), ("made", "ordinary", "float64")]
    gradients = [gradient(framework, structure, kind, dtype, EXAMPLES, 3) for structure, kind, dtype in kinds]
    found = [sum(map(square, of_example)) for of_example in zip(*map(exact, gradients), strict=True)]
    above, about = compiled_squares(gradients) if framework == "jax" else squares_from_above(framework, gradients)
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
        PlacedTerms(MatrixPlace((at, 0, 0), (at + blocks, 1, 1), (blocks, 1, 1), (0,), (1,), (2,)), [Dense(*sides)])
        for at in (0, blocks)
    ]
    ((upper,), _) = squares_from_above(framework, [parts])
    assert upper / (2 * blocks) >= 1 + 2 * blocks * Fraction(1, 2**53)
