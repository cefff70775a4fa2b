"""float32 products on the host, which are rounded to nearest, each beside the exact one in fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest

import gradclip
from frameworks import ALL, by_name

HOSTS = [f for f in ALL if f.name in ("numpy", "torch", "jax", "mlx")]
SMALLEST_NORMAL, STEP = Fraction(2) ** -126, Fraction(2) ** -149


def unit(x):
    """Return the unit in the last place of a float32 number of this magnitude."""
    return STEP if x < SMALLEST_NORMAL else Fraction(2) ** (math.frexp(x)[1] - 24)


def drawn(seed, magnitude, size=37):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=size) * magnitude
    x[::5] = rng.integers(-9, 9, x[::5].shape) * float(STEP)
    x[1::7] *= 10.0 ** rng.uniform(-20, 0, x[1::7].shape)
    return x.astype(np.float32)


@pytest.mark.parametrize("dense", [True, False], ids=["kernels", "chunks"])
@pytest.mark.parametrize("magnitude", [1e-44, 1e-40, 1e-38, 1e-20, 1.0, 1e20, 1e37])
@pytest.mark.parametrize("framework", HOSTS, ids=by_name)
def test_each_is_just_below_the_exact_product(framework, magnitude, dense):
    """Order 1 has a rational norm. Coefficients go down to 2**-245, where two factors are needed."""
    for seed, share in enumerate((1.0 - 2.0**-20, 0.9, 0.3, 1e-3, 1e-12, 1e-37, 1e-45, 1e-73)):
        x = drawn(seed, magnitude)
        total = sum(abs(Fraction(v)) for v in x.tolist())
        threshold = float(total) * share
        given = framework.from_numpy(x if dense else np.repeat(x, 2))
        clipped = gradclip.clip_by_global_norm(given if dense else given[::2], threshold, ord=1)[0]
        found = framework.to_numpy(clipped).tolist()
        for before, after in zip(x.tolist(), found, strict=True):
            exact = abs(Fraction(before)) * Fraction(threshold) / total
            units = 4 if Fraction(threshold) / total >= SMALLEST_NORMAL else 5
            assert exact - units * unit(exact) <= abs(Fraction(after)) <= exact
            assert math.copysign(1.0, after) == math.copysign(1.0, before)
        if min(total, Fraction(threshold)) > SMALLEST_NORMAL * 2**40:
            assert sum(abs(Fraction(v)) for v in found) >= Fraction(threshold) * (1 - Fraction(1, 10**5))


@pytest.mark.parametrize("framework", HOSTS, ids=by_name)
def test_products_below_the_normal_range_are_not_rounded_up(framework):
    """Three steps of float32's smallest number times 0.6 are 1.8 steps, which rounding to nearest makes 2."""
    step = float(STEP)
    x = framework.array(np.array([3.0, 2.0]) * step)
    clipped = gradclip.clip_by_global_norm(x, 3.0 * step, ord=1)[0]
    assert framework.to_numpy(clipped).tolist() == [step, 0.0]


@pytest.mark.parametrize("framework", HOSTS, ids=by_name)
def test_two_factors_do_not_round_up_to_the_smallest_normal_number(framework):
    """The product with the first is the number below 1, and the second rounds it again."""
    for share in (0.0625, 0.25, 0.375):
        threshold = 2.0**-126 * (1.0 - share * 2.0**-24)
        for number in (1.974029, 1.6010954, 1.6132176, 1.9049007, 1.8598387, *np.arange(1.0, 2.0, 2.0**-4)):
            x = framework.array(np.array([number]))
            clipped = gradclip.clip_by_global_norm(x, threshold)[0]
            assert Fraction(float(framework.to_numpy(clipped)[0])) <= Fraction(threshold)


@pytest.mark.parametrize("framework", HOSTS, ids=by_name)
def test_parts_of_complex_numbers_are_multiplied_alike(framework):
    x = drawn(1, 1.0)
    factor = np.float32(0.25)
    real = gradclip.clip_by_global_norm(framework.array(x), factor, ord="inf")[0]
    both = gradclip.clip_by_global_norm(framework.array(x * 1j, "complex64"), factor, ord="inf")[0]
    assert framework.to_numpy(both).imag.tolist() == framework.to_numpy(real).tolist()
