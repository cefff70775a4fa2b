"""Norms that equal the threshold, or differ from it by one unit in the last place of one element, beside fractions."""

import math
import time

import numpy as np
import pytest
import torch

import gradclip
from frameworks import numpy_dtype
from gradclip._src.backends.host import exact
from gradclip._src.backends.host.arrays import HostArray, HostArrays
from gradclip._src.backends.host.backend import HOST
from gradclip._src.native import Described
from rational import at_most, power_of_norm, random_leaf

REAL = ("float16", "bfloat16", "float32", "float64")
EXPONENTS = {"float16": (-24, 12), "bfloat16": (-133, 124), "float32": (-149, 124), "float64": (-1074, 1020)}
LAYOUTS = {
    "dense": lambda x: HOST.enter([x]),
    "in two": lambda x: HOST.enter(np.split(x, [len(x) // 3])),
    "strided": lambda x: HOST.enter([x.repeat(2)[::2]]),
    "without kernels": lambda x: HostArrays([HostArray.of(x)], lambda a: a, Described(None, [0])),
}
everywhere = pytest.mark.parametrize("layout", LAYOUTS)


def decided(x, p, threshold, layout):
    with HOST.precision():
        return exact.at_most(HOST, LAYOUTS[layout](x), float(p), threshold)


def tie(rng, dtype, p):
    """Return numbers of one magnitude, k**p of them (k = 1 for high orders), among zeros, and their norm."""
    k = int(rng.integers(1, {1: 400, 2: 60, 3: 8, 4: 5}.get(p, 1) + 1))
    magnitude = float(rng.integers(1, 8)) * 2.0 ** int(rng.integers(*EXPONENTS[dtype]))
    k = k if k * magnitude < 1e308 else 1
    values = np.zeros(k**p + int(rng.integers(20)))
    values[: k**p] = rng.choice([-magnitude, magnitude], size=k**p)
    return rng.permutation(values).astype(numpy_dtype(dtype)), k * magnitude


def nudged(x, by):
    """Return the numbers, one that is not zero by so many units in the last place farther from zero."""
    x = x.copy()
    at = np.flatnonzero(x)[-1]
    x.view(f"u{x.itemsize}")[at] += np.array(by).astype(f"u{x.itemsize}")
    return x


@everywhere
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 64])
def test_ties_and_what_is_next_to_them(p, dtype, layout):
    rng = np.random.default_rng([p, len(dtype), len(layout)])
    for _ in range(12):
        x, norm = tie(rng, dtype, p)
        assert at_most([x], p, norm)
        assert decided(x, p, norm, layout)
        assert not decided(nudged(x, 1), p, norm, layout)
        assert decided(nudged(x, -1), p, norm, layout)
        assert not decided(x, p, float(np.nextafter(norm, 0)), layout)


@everywhere
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 64])
def test_norms_rounded_to_either_side(p, dtype, layout):
    rng = np.random.default_rng([p, len(dtype), len(layout), 1])
    outcomes = []
    for _ in range(12):
        x = random_leaf(rng, dtype, int(rng.integers(1, 6 + 60 // p)))
        total = power_of_norm([x], p)
        near = nearest_root(total, p)
        if not 0 < near < 1e308:
            continue
        for threshold in (near, float(np.nextafter(near, 0)), float(np.nextafter(near, math.inf))):
            outcomes.append(at_most([x], p, threshold))
            assert decided(x, p, threshold, layout) == outcomes[-1]
    assert {True, False} == set(outcomes)


def nearest_root(total, p):
    """Return a float64 number within some units in the last place of the root of order p of a fraction."""
    if not total:
        return 0.0
    digits = total.numerator.bit_length() - total.denominator.bit_length()
    exponent = digits // p * p
    scaled = total / 2**exponent if exponent > 0 else total * 2**-exponent
    return math.ldexp(float(scaled) ** (1 / p), exponent // p)


@pytest.mark.parametrize("layout", ["dense", "strided", "without kernels"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("p", [2, math.inf, -math.inf])
def test_complex_numbers(p, dtype, layout):
    """The magnitude of 3 + 4i is 5, and that of 5 + 12i is 13: of all four together the norm is 2 * 13."""
    for scale in (2.0**-140, 1.0, 2.0**100):
        x = (np.array([5 + 12j, -12 + 5j, 13, 13j]) * scale).astype(dtype)
        norm = (26.0 if p == 2 else 13.0) * scale
        below, above = x.copy(), x.copy()
        below.real[:] = np.nextafter(below.real, 0)
        above.real[:2] = np.nextafter(above.real[:2], math.inf * np.sign(above.real[:2]))
        above.real[2] *= 1.5
        above.imag[3] *= 1.5
        assert decided(x, p, norm, layout)
        assert not decided(x, p, float(np.nextafter(norm, 0)), layout)
        assert not decided(above, p, norm, layout)
        assert decided(below, p, norm, layout)


@everywhere
def test_numbers_far_apart(layout):
    """Squares from 1e-640 to 1e600 in one sum: it equals the square of 1e300 only without the small ones."""
    large = np.zeros(5000)
    large[7] = 2.0**1000
    for p, small in ((1, 2.0**-1074), (2, 2.0**-1074), (2, 1e-3), (3, 1e-300), (1, 1e290)):
        with_small = large.copy()
        with_small[4000] = small
        assert decided(large, p, 2.0**1000, layout)
        assert not decided(with_small, p, 2.0**1000, layout)


@pytest.mark.parametrize("p", [1, 2])
def test_many_numbers_far_from_one(p):
    """Of 160,000 numbers of 1e-250 the norm is 400 times that, their squares being zeros in float64."""
    x = np.full(160_000, 2.0**-830)
    norm = 2.0**-830 * (400 if p == 2 else 160_000)
    for layout in LAYOUTS:
        assert decided(x, p, norm, layout)
        assert not decided(nudged(x, 1), p, norm, layout)


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("variant", ["numpy", "torch", "in place"])
def test_clipping_leaves_a_tie_alone_and_clips_what_is_next_to_it(dtype, variant):
    signs = np.random.default_rng(0).choice([-1, 1], size=65536).astype(numpy_dtype(dtype))
    for x, fits in ((signs, True), (nudged(signs, 1), False)):
        if variant == "torch":
            bits = torch.from_numpy(x.view(f"i{x.itemsize}").copy())
            clipped, _ = gradclip.clip_by_global_norm(bits.view(getattr(torch, dtype)), 256.0)
            clipped = clipped.view(bits.dtype).numpy()
        elif variant == "in place":
            clipped = x.copy()
            gradclip.clip_grad_norm_([clipped], 256.0)
        else:
            clipped, _ = gradclip.clip_by_global_norm(x, 256.0)
        assert (clipped.tobytes() == x.tobytes()) == fits


def test_a_complex_number_of_the_largest_magnitude_allowed_is_left_alone():
    x = np.array([3 + 4j, -5j, 1])
    clipped, _ = gradclip.clip_by_global_norm(x, 5.0, ord=math.inf)
    assert clipped.tobytes() == x.tobytes()


def seconds(*functions):
    """Return the least time of the processor that each of the functions takes, called in turns."""
    times = [[] for _ in functions]
    for _ in range(9):
        for function, found in zip(functions, times, strict=True):
            start = time.thread_time()
            function()
            found.append(time.thread_time() - start)
    return list(map(min, times))


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("ord", [1, 2])
def test_a_tie_costs_little_more_than_another_call(dtype, ord):
    """Signs; added one after the other they take 50 times as long."""
    signs = np.random.default_rng(0).choice([-1, 1], size=1 << 18).astype(numpy_dtype(dtype))
    norm = 2.0**18 if ord == 1 else 512.0
    clips = [lambda c=c: gradclip.clip_by_global_norm(signs, c, ord=ord) for c in (1.01 * norm, norm)]
    usual, tied = seconds(*clips)
    assert tied < 10 * usual


@pytest.mark.parametrize("ord", [3, 64])
def test_high_orders_of_many_different_numbers(ord):
    """With its own norm for a threshold; by rational numbers that takes 10 seconds."""
    x = np.random.default_rng(0).normal(size=100_000)
    norm = float(gradclip.global_norm(x, ord=ord))
    assert seconds(lambda: gradclip.clip_by_global_norm(x, norm, ord=ord))[0] < 0.5
