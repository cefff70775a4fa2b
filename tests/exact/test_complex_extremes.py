"""Complex numbers whose magnitudes leave float64's range, or are rounded to its smallest step."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.backends.host.backend import HOST
from gradclip._src.core.norms import Order
from gradclip._src.distributed.process_groups import filled

HUGE = 1.5e308 + 1.5e308j
STEP = 2.0**-1074
ORDERS = (1, 2, 2.5, 700, math.inf, -math.inf)
THRESHOLDS = (1.7e308, 1e-20)
PATHS = {
    "numpy": lambda f, tree: f(tree),
    "strided": lambda f, tree: f([np.repeat(x, 2)[::2] for x in tree]),
    "torch": lambda f, tree: f([torch.tensor(x) for x in tree]),
    "func": lambda f, tree: [x[0] for x in torch.func.vmap(f)([torch.tensor(x)[None] for x in tree])],
    "jax": lambda f, tree: f([jnp.asarray(x) for x in tree]),
    "jit": lambda f, tree: jax.jit(f)([jnp.asarray(x) for x in tree]),
    "vmap": lambda f, tree: [x[0] for x in jax.vmap(f)([jnp.asarray(x)[None] for x in tree])],
}


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def flat(tree):
    return np.concatenate([np.asarray(x, np.complex128) for x in tree])


def square(z):
    return Fraction(float(z.real)) ** 2 + Fraction(float(z.imag)) ** 2


def ratio(tree, p, threshold):
    """Return the norm over the threshold; of the orders 2, inf and -inf its square, exactly."""
    squares = [square(z) / Fraction(threshold) ** 2 for z in flat(tree)]
    if p == 2:
        return sum(squares)
    if math.isinf(p):
        return max(squares) if p > 0 else min(squares)
    largest = max(squares)
    return float(sum(float(s / largest) ** (p / 2) for s in squares)) ** (1 / p) * math.sqrt(float(largest))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("p", ORDERS)
def test_magnitudes_beyond_the_range_are_clipped_to_the_threshold(path, p):
    tree = [np.array([HUGE, -HUGE, HUGE.conjugate()])]
    if p > 0:
        tree = [np.array([3e307, HUGE, 0.0, 1e-320j]), np.float32([3e38, 1.0])]

    def clip(tree):
        results = [gradclip.clip_by_global_norm(tree, threshold, ord=p) for threshold in THRESHOLDS]
        return [x for clipped, norm in results for x in (*clipped, norm)]

    found = PATHS[path](clip, tree)
    exact = math.isinf(p) or p == 2
    for place, threshold in enumerate(THRESHOLDS):
        *clipped, norm = found[place * (len(tree) + 1) :][: len(tree) + 1]
        assert np.isinf(np.asarray(norm))
        assert 1 - 1e-5 < ratio(clipped, p, threshold) <= (1 if exact else 1 + 1e-12)


@pytest.mark.parametrize("policy", ["raise", "drop", "zero"])
def test_no_policy_takes_them_for_infinities(policy):
    tree = [np.array([HUGE, 3.0])]
    clipped, _ = gradclip.clip_by_global_norm(tree, 1.0, nonfinite=policy)
    assert 1 - 1e-5 < ratio(clipped, 2, 1.0) <= 1


@pytest.mark.parametrize("path", PATHS)
def test_infinities_beside_them_are_left_to_the_policy(path):
    tree = [np.array([HUGE, math.inf, 1.0])]

    def clip(tree):
        skipped, _ = gradclip.clip_by_global_norm(tree, 1.0, nonfinite="drop")
        zeroed, _ = gradclip.clip_by_global_norm(tree, 1.0, nonfinite="zero")
        spoiled, _ = gradclip.clip_by_global_norm(tree, 1.0)
        return [*skipped, *zeroed, *spoiled]

    skipped, zeroed, spoiled = map(np.asarray, PATHS[path](clip, tree))
    assert not skipped.any()
    assert 1 - 1e-5 < ratio([zeroed], 2, 1.0) <= 1
    assert np.isnan(spoiled).all()


def test_errors_name_only_what_is_not_finite():
    for array in (np.asarray, torch.tensor, jnp.asarray):
        with pytest.raises(FloatingPointError, match=r"1 (inf|infinit)"):
            gradclip.clip_by_global_norm([array(np.array([HUGE, math.inf]))], 1.0, nonfinite="raise")


@pytest.mark.parametrize("array", [np.asarray, torch.tensor, jnp.asarray])
@pytest.mark.parametrize("jitted", [False, True])
def test_an_example_so_large_is_clipped_and_changes_no_other(array, jitted):
    rows = np.array([[HUGE, 1.0], [3.0, 4j], [0.3, 0.4], [1e-320j, 0]])
    clip = lambda x: gradclip.per_example_clip(x, 1.0, sum_dtype="float64")
    clip = jax.jit(clip) if jitted and array is jnp.asarray else clip
    summed, info = clip(array(rows))
    assert int(info.num_clipped) == 2
    one, _ = clip(array(rows[:1]))
    assert 1 - 1e-5 < ratio([one], 2, 1.0) <= 1
    others, _ = clip(array(rows[1:]))
    np.testing.assert_allclose(np.asarray(summed), np.asarray(one) + np.asarray(others), rtol=1e-12)


def test_in_place_and_in_parts():
    class Parameter:
        grad = np.array([HUGE, 3.0])

    parameter = Parameter()
    assert gradclip.clip_grad_norm_([parameter], 1.0, nonfinite="raise") == math.inf
    assert 1 - 1e-5 < ratio([parameter.grad], 2, 1.0) <= 1
    parts = [np.array([HUGE]), np.array([3.0, 1e300])]
    for p in (1, 2, 3):
        whole = sum(gradclip.partial_norm(part, p) for part in parts)
        assert 1 - 1e-5 < ratio([whole.clip(part, 1.0) for part in parts], p, 1.0) <= 1 + 1e-12


def below(rng, count):
    """Return complex numbers of a few of the smallest steps."""
    return (rng.integers(0, 30, size=count) + 1j * rng.integers(0, 30, size=count)) * STEP


@pytest.mark.parametrize("path", ["numpy", "strided", "torch", "jax", "jit"])
@pytest.mark.parametrize("p", [math.inf, -math.inf, 1, 3])
def test_magnitudes_that_are_rounded_to_the_smallest_step_stay_within_the_bound(path, p):
    rng = np.random.default_rng(0)
    for _ in range(4 if path == "jit" else 50):
        x = below(rng, int(rng.integers(1, 4)))
        threshold = int(rng.integers(1, 45)) * STEP
        clip = lambda tree, threshold=threshold: gradclip.clip_by_global_norm(tree, threshold, ord=p)[0]
        (y,) = map(np.asarray, PATHS[path](clip, [x]))
        if math.isinf(p):
            assert ratio([y], p, threshold) <= 1
        else:
            units = [math.sqrt(float(square(z) / Fraction(STEP) ** 2)) for z in y]
            assert sum(m**p for m in units) ** (1 / p) <= threshold / STEP * (1 + 1e-12)


@pytest.mark.parametrize("p", [math.inf, -math.inf])
def test_ties_of_such_magnitudes_are_decided_exactly(p):
    rng = np.random.default_rng(1)
    for _ in range(100):
        x = below(rng, int(rng.integers(1, 4)))
        threshold = int(rng.integers(0, 45)) * STEP
        fits = ratio([x], p, STEP) <= Fraction(threshold / STEP) ** 2
        assert gradclip.norm_at_most(x, threshold, ord=p) == fits
        clipped, _ = gradclip.clip_by_global_norm(x, threshold, ord=p)
        assert np.array_equal(clipped, x) or not fits


@pytest.mark.parametrize("p", [math.inf, -math.inf])
def test_parts_of_such_magnitudes_stay_within_the_bound(p):
    rng = np.random.default_rng(2)
    for _ in range(100):
        parts = [below(rng, 2), below(rng, 1)]
        threshold = int(rng.integers(1, 45)) * STEP
        whole = sum(gradclip.partial_norm(part, p) for part in parts)
        assert ratio([whole.clip(part, threshold) for part in parts], p, threshold) <= 1


@pytest.mark.parametrize("array", [np.asarray, torch.tensor, jnp.asarray])
@pytest.mark.parametrize("p", [math.inf, -math.inf])
@pytest.mark.parametrize("size", [(), (1,), (3, 2)])
def test_real_and_complex_leaves_at_a_tie(array, p, size):
    tree = [array(np.full(size, 5.0)), array(np.full(size, 3 + 4j)), array(np.full(size, -5.0, np.float32))]
    clipped, norm = gradclip.clip_by_global_norm(tree, 5.0, ord=p)
    assert norm == 5.0
    assert all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(clipped, tree, strict=True))
    assert gradclip.norm_at_most(tree, 5, ord=p)
    assert not gradclip.norm_at_most(tree, Fraction(5) - Fraction(1, 10**30), ord=p)


@pytest.mark.parametrize("p", [math.inf, -math.inf])
def test_what_processes_tell_each_other_is_not_below_such_magnitudes(p):
    rng = np.random.default_rng(3)
    for _ in range(100):
        x = below(rng, 1)
        arrays = HOST.enter([x])
        number, *_ = filled(HOST.xp, HOST.norms(arrays, Order(p)), Order(p), arrays)
        assert Fraction(abs(float(number))) ** 2 >= square(x[0])
