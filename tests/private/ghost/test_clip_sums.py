"""Sums of clipped gradients in factors: their bound and their distance, in exact arithmetic."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from factors import DTYPES, KINDS, PRODUCTS, array, exact, gradient, place_of, square
from gradclip._src.backends.registry import find
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.rules import CLIP, Target
from gradclip._src.private.ghost.certificate import rounding_of_sum
from gradclip._src.private.ghost.clip import ExampleClipping, clipped_sums
from gradclip._src.private.ghost.records import Dense, Made, PlacedTerms

EXAMPLES = 5
STRUCTURES = ["product", "embedding", "tied", "made"]


def sums_of(framework, gradients, shapes, threshold, target=CLIP, nonfinite="drop", mask=None):
    """Return the sums as lists of float64 numbers, and the norms."""
    near = torch.ones(1) if framework == "torch" else jnp.ones(1)
    backend = find([near], lambda: ["near"], threshold, mask)
    with backend.precision(), jax.enable_x64(True):
        clipping = ExampleClipping(threshold, target, Nonfinite.named(nonfinite))
        products = PRODUCTS[framework](concrete=True)
        sums, norm = clipped_sums(products, backend, gradients, [(x, "float64") for x in shapes], clipping, mask)
        return [np.asarray(x, np.float64) for x in sums], np.asarray(norm.product())


def masked_sum(framework, given, threshold, mask):
    """Return the sum of one gradient in a list, and the norms; in JAX by a program that is compiled once."""
    if framework == "torch":
        return sums_of(framework, [given], [(3, 2)], threshold, mask=mask)
    with jax.enable_x64(True):
        terms = given if isinstance(given, Made) else [part.terms for part in given]
        total, norms = compiled(terms, np.float64(threshold), mask)
        return [np.asarray(total)], np.asarray(norms)


@jax.jit
def compiled(terms, threshold, mask):
    backend = find(jax.tree.leaves(terms), lambda: ["terms"], threshold, mask)
    given = terms if isinstance(terms, Made) else [PlacedTerms(place_of(3, 2), one) for one in terms]
    with backend.precision():
        clipping, products = ExampleClipping(threshold, CLIP, Nonfinite.named("drop")), PRODUCTS["jax"](concrete=False)
        (total,), norm = clipped_sums(products, backend, [given], [((3, 2), "float64")], clipping, mask)
        return total, norm.product()


def distance(sums, others):
    """Return the exact square of the distance of two lists of arrays."""
    pairs = ((x, y) for a, b in zip(sums, others, strict=True) for x, y in zip(a.flat, b.flat, strict=True))
    return sum((Fraction(float(x)) - Fraction(float(y))) ** 2 for x, y in pairs)


def one_left_out(place):
    mask = np.ones(EXAMPLES, bool)
    mask[place] = False
    return mask


@pytest.mark.every_case
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_one_example_moves_the_sum_by_no_more_than_the_bound(framework, structure, dtype, kind):
    given = gradient(framework, structure, kind, dtype, EXAMPLES, 4)
    # At about half of the norm, some are clipped and some are not.
    threshold = sorted(float(square(one)) ** 0.5 for one in exact(given))[EXAMPLES // 2]
    whole, _ = masked_sum(framework, given, threshold, np.ones(EXAMPLES, bool))
    most = Fraction(threshold) * (1 + EXAMPLES * rounding_of_sum(EXAMPLES, cancels=structure != "made"))
    for place in range(EXAMPLES):
        others, _ = masked_sum(framework, given, threshold, one_left_out(place))
        assert distance(whole, others) <= most**2
        alone, norms = masked_sum(framework, given, threshold, ~one_left_out(place))
        assert distance(alone, [np.zeros((3, 2))]) <= most**2
        assert norms[place] > 0
        assert not norms[one_left_out(place)].any()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_sums_are_those_of_the_exact_gradients(framework, structure):
    given = gradient(framework, structure, "ordinary", "float64", EXAMPLES, 3)
    (total,), norms = sums_of(framework, [given], [(3, 2)], 2.0)
    elements = np.array([[float(x) for x in one] for one in exact(given)])
    lengths = np.sqrt((elements**2).sum(1))
    expected = (elements * np.minimum(1.0, 2.0 / lengths)[:, None]).sum(0).reshape(3, 2)
    np.testing.assert_allclose(total, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(norms, lengths, rtol=1e-12)


@pytest.mark.parametrize("target", [Target(1.0), Target(gamma=0.0), Target(gamma=0.5), Target(1.0, gamma=0.5)])
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_rules(framework, target):
    given = gradient(framework, "product", "ordinary", "float64", EXAMPLES, 3)
    (total,), norms = sums_of(framework, [given], [(3, 2)], 2.0, target)
    elements = np.array([[float(x) for x in one] for one in exact(given)])
    top = target.length or 2.0
    weights = top / (norms + target.gamma) if target.gamma is not None else np.minimum(top / 2.0, top / norms)
    np.testing.assert_allclose(total.ravel(), (elements * weights[:, None]).sum(0), rtol=1e-9)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("side", ["left", "right", "made"])
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_an_example_that_is_not_finite_adds_nothing(framework, side, broken):
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((3, 1, 2, n)) for name, n in (("left", 3), ("right", 2))}
    arrays["made"] = rng.standard_normal((3, 4))
    arrays[side][1].flat[0] = broken
    arrays = {name: array(framework, x, "float32") for name, x in arrays.items()}
    given = [[PlacedTerms(place_of(3, 2), [Dense(arrays["left"], arrays["right"])])], Made(arrays["made"])]
    shapes = [(3, 2), (4,)]
    sums, norms = sums_of(framework, given, shapes, 1.0)
    without, _ = sums_of(framework, given, shapes, 1.0, mask=np.array([True, False, True]))
    assert not np.isfinite(norms[1])
    assert all((x == y).all() and np.isfinite(x).all() for x, y in zip(sums, without, strict=True))
    spoiled, _ = sums_of(framework, given, shapes, 1.0, nonfinite="propagate")
    assert all(np.isnan(x).all() for x in spoiled)
    with pytest.raises(FloatingPointError, match="the gradients of 1 of 3 examples are not finite"):
        sums_of(framework, given, shapes, 1.0, nonfinite="raise")
    masked, _ = sums_of(framework, given, shapes, 1.0, nonfinite="raise", mask=np.array([True, False, True]))
    assert all((x == y).all() for x, y in zip(masked, without, strict=True))


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_threshold_of_zero_and_one_of_infinity(framework):
    given = gradient(framework, "tied", "ordinary", "float32", EXAMPLES, 2)
    (nothing,), _ = sums_of(framework, [given], [(3, 2)], 0.0)
    (everything,), _ = sums_of(framework, [given], [(3, 2)], float("inf"))
    assert not nothing.any()
    exactly = [float(sum(column)) for column in zip(*exact(given), strict=True)]
    np.testing.assert_allclose(everything.ravel(), exactly, rtol=1e-12)


def one_product(framework, left, right, dtype="float32"):
    """Return the gradient of one example: a product of two numbers."""
    sides = [np.full((1, 1, 1, 1), side, dtype) for side in (left, right)]
    with jax.enable_x64(True):
        return [
            PlacedTerms(place_of(1, 1), [Dense(*map(torch.tensor if framework == "torch" else jnp.asarray, sides))])
        ]


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_tiny_thresholds_hold(framework):
    # Times a weight near 2**-930, the left side would be a multiple of the smallest number, and rounded to it.
    given = one_product(framework, 1.5 * 2.0**-140, 2.0**127)
    for threshold in 2.0 ** np.arange(-950, -930) * np.linspace(1, 2, 20):
        (total,), _ = sums_of(framework, [given], [(1, 1)], float(threshold))
        assert abs(Fraction(float(total[0, 0]))) <= Fraction(float(threshold))


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_weights_beyond_the_range_spoil_nothing(framework):
    zero, tiny = one_product(framework, 2.0**120, 0.0), one_product(framework, 2.0**-600, 2.0**-600, "float64")
    for given in ([zero], [zero, tiny], [tiny, zero]):
        sums, _ = sums_of(framework, given, [(1, 1)] * len(given), 1e300, Target(gamma=0.0))
        assert np.isfinite(sums).all()


@pytest.mark.parametrize("target", [CLIP, Target(gamma=0.0)])
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_norms_beyond_the_range_hold(framework, target):
    for exponent in (-595, -590, -585, 511, 515, 530, 597, 600):
        given = one_product(framework, 1.3 * 2.0**exponent, 1.7 * 2.0**exponent, "float64")
        (element,) = exact(given)[0]
        (total,), _ = sums_of(framework, [given], [(1, 1)], 1.0, target)
        assert abs(Fraction(float(total[0, 0]))) <= 1
        if 2**-890 < element < 2**1030:
            assert total[0, 0] > 0.99 or (exponent < 0 and target is CLIP)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_sum_is_finite_where_weights_in_units_add_up_to_more_than_the_range(framework):
    ((part,),) = [one_product(framework, 2.0**600, 2.0**420, "float64")]
    with jax.enable_x64(True):
        four = Dense(*((torch.cat if framework == "torch" else jnp.concatenate)([x] * 4) for x in part.terms[0]))
    (total,), _ = sums_of(framework, [[PlacedTerms(part.place, [four])]], [(1, 1)], 1e308, nonfinite="propagate")
    assert total[0, 0] == 2.0**1022
