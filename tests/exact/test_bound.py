"""The bound, on random trees, in exact arithmetic: no result may exceed its threshold, ever."""

import math
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

import gradclip
from frameworks import ALL, MORE_OF_MLX, by_name
from rational import at_most, power_of_norm, random_leaf, random_threshold

TRIALS = {
    "numpy": 6000,
    "torch": 2000,
    "tensorflow": 1000,
    "torch-device": 2000,
    "jax": 500,
    "jax-jit": 2000,
    "jax-x64": 500,
    "jax-x64-jit": 1500,
    "mlx": 1000,
    "mlx-device": 1000,
    "mlx-device32": 1000,
    "mlx-jit": 500,
}
SIZES = (1, 2, 3, 7, 16, 17)
TIGHTNESS = {"bfloat16": 0.99, "float16": 0.99}


def trial(rng, framework):
    """Return a random tree that, for compiled frameworks, has one of few structures."""
    first = int(rng.integers(len(framework.dtypes)))
    kinds = [framework.dtypes[(first + k) % len(framework.dtypes)] for k in range(1 + first % 2)]
    sizes = [SIZES[(first + k) % len(SIZES)] if framework.jit else int(rng.choice(SIZES)) for k in range(len(kinds))]
    ord = [2, 2, 1, 3, math.inf][int(rng.integers(5))]
    if any("complex" in kind for kind in kinds) or framework.name == "mlx-jit":  # which takes long to compile
        ord = 2
    leaves = [random_leaf(rng, kind, size) for kind, size in zip(kinds, sizes, strict=True)]
    threshold = random_threshold(rng, leaves, ord)
    if framework.jit and "float32" in framework.dtypes:
        threshold = float(np.float32(min(threshold, 3e38)))
    return kinds, leaves, ord, threshold


@cache
def clipper(framework, ord):
    """Return our function, compiled once for all seeds where that is meant."""
    return framework.compiled(lambda t, c: gradclip.clip_by_global_norm(t, c, ord=ord))


@pytest.mark.parametrize("framework", [*ALL, *MORE_OF_MLX], ids=by_name)
@pytest.mark.parametrize("seed", [0, 1])
def test_no_violation(framework, seed):
    rng = np.random.default_rng([seed, len(framework.name)])
    clips = {ord: clipper(framework, ord) for ord in (1, 2, 3, math.inf)}
    clipped_trials = 0
    with framework.mode():
        for _ in range(TRIALS[framework.name] // 2):
            kinds, leaves, ord, threshold = trial(rng, framework)
            if not all(np.isfinite(leaf.astype(complex)).all() for leaf in leaves):
                continue
            given = [framework.from_numpy(leaf) for leaf in leaves]
            results, norm = clips[ord](
                given,
                framework.array(threshold) if "jit" in framework.name and "x64" not in framework.name else threshold,
            )
            results = [framework.to_numpy(result) for result in results]
            assert at_most(results, ord, threshold), (kinds, ord, threshold, leaves)
            fits = at_most(leaves, ord, threshold)
            if fits and not framework.traced:
                assert all(a.tobytes() == b.tobytes() for a, b in zip(leaves, results, strict=True)), (kinds, leaves)
            if not fits and ord == 2 and threshold > (1e-2 if "float16" in kinds else 1e-30):
                clipped_trials += 1
                if (
                    framework.name in ("torch-device", "mlx-device32")
                    and Fraction(threshold) ** 2 < power_of_norm(leaves, 2) * Fraction(2) ** -250
                ):
                    continue  # the one number that elements are multiplied by is coarse, or zero, in float32
                least = Fraction(min(TIGHTNESS.get(kind, 1 - 1e-5) for kind in kinds)) * Fraction(threshold)
                assert power_of_norm(results, 2) >= least**2, (kinds, threshold, leaves)
            check_norm(norm, leaves, ord)
    assert clipped_trials > 50


def check_norm(norm, leaves, ord):
    if ord != 2 or not 1e-37 < float(norm) < 3e38:
        return
    exact = power_of_norm(leaves, 2)
    error = abs(float(Fraction(float(norm)) ** 2 / exact - 1)) / 2
    assert error <= (1e-14 if np.asarray(norm).dtype == np.float64 else 1e-6)


def test_the_check_finds_the_usual_formula_guilty():
    rng = np.random.default_rng(0)
    broken = 0
    for _ in range(300):
        x = rng.normal(size=7).astype(np.float32)
        norm = np.linalg.norm(x)
        broken += not at_most([x * np.float32(min(np.float32(1.0), np.float32(1.0) / norm))], 2, 1.0)
    assert broken > 50


@pytest.mark.parametrize("size", [65537, 1_000_000])
@pytest.mark.parametrize("name", ["numpy", "torch", "torch-device", "jax", "jax-jit", "mlx", "mlx-device"])
def test_large_arrays(name, size):
    framework = next(f for f in ALL if f.name == name)
    x = np.random.default_rng(size).normal(size=size).astype(np.float32)
    function = lambda t: gradclip.clip_by_global_norm(t, 0.1)[0]
    result = framework.to_numpy(framework.call(function, framework.array(x))).astype(np.float64)
    total = math.fsum([*(result**2).tolist(), -(Fraction(0.1) ** 2)])
    assert (1 - 1e-5) ** 2 - 1 <= total / 0.01 <= 0


@pytest.mark.parametrize("seed", range(3))
def test_each_example_of_a_batch(seed):
    rng = np.random.default_rng(seed)
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        grads = random_leaf(rng, dtype, 40).reshape(8, 5)
        grads = np.where(np.isfinite(grads.astype(float)), grads, grads.dtype.type(1))
        for i in range(8):
            alone = np.zeros(8, bool)
            alone[i] = True
            summed, _ = gradclip.per_example_clip(grads, 0.5, mask=alone)
            slack = 1 + 2.0**-24 if dtype != "float64" else 1
            assert power_of_norm([summed], 2) <= (Fraction(0.5) * Fraction(slack)) ** 2
