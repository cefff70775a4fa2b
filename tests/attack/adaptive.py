"""Thresholds that follow norms of any magnitude: each step is kept, clipped or skipped as its exact norm says."""

import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np

import gradclip
from attack.truth import at_most, norm
from frameworks import WITH_FLOAT32

EAGER = [framework for framework in WITH_FLOAT32 if not framework.jit]
NEAR = 2.0**-17
"""By how much norms and thresholds may differ, relatively, for the outcome to be open."""
STEP = {"float32": Fraction(2) ** -149, "float64": Fraction(2) ** -1074}


def attack(rng):
    """Clip a few gradients, whose sizes are about one level and far above it, and compare with exact norms."""
    framework = EAGER[int(rng.integers(len(EAGER)))]
    dtype = str(rng.choice([name for name in STEP if name in framework.dtypes]))
    ord = float(rng.choice([1, 2, math.inf]))
    low, high = (-100, 110) if dtype == "float32" else (-1000, 1000)
    level, window = int(rng.integers(low, high)), int(rng.integers(1, 4))
    skip_above = float(rng.choice([1.0, 2.0, 100.0, math.inf]))
    max_norm = gradclip.AdaptiveThreshold(gradclip.QuantileRule(window=window), skip_above=skip_above)
    for _ in range(6):
        exponent = level + int(rng.choice([0, 1, 2, 10, 200 if dtype == "float32" else 2000]))
        x = _gradient(rng, dtype, exponent)
        skipped = max_norm.num_skipped
        one = SimpleNamespace(grad=framework.array(x, dtype))
        with framework.mode():
            gradclip.clip_grad_norm_([one], max_norm, ord)
        told = f"{framework.name} {dtype}, ord {ord}, {max_norm} at {float(max_norm.max_norm)}: {x}"
        _check(x, framework.to_numpy(one.grad), max_norm, ord, max_norm.num_skipped > skipped, told)


def _gradient(rng, dtype, exponent):
    largest = 127 if dtype == "float32" else 1023
    mantissas = rng.uniform(0.5, 1.0, int(rng.integers(1, 300))) * rng.choice([-1.0, 1.0])
    return np.ldexp(mantissas, min(exponent, largest)).astype(dtype)


def _check(x, y, max_norm, ord, skipped, told):
    true, threshold = norm([x], ord), float(max_norm.max_norm)
    assert np.isfinite(y).all(), told
    assert at_most([y], ord, threshold), told
    if threshold == math.inf:
        assert (y == x).all(), told
        assert not skipped, told
        return
    if true <= Fraction(threshold) * Fraction(1 - NEAR) - STEP[str(x.dtype)]:
        assert (y == x).all(), told
    times = true / Fraction(threshold)
    if times > max_norm.skip_above * (1 + NEAR):
        assert skipped, told
    if times < max_norm.skip_above * (1 - NEAR):
        assert not skipped, told
    if skipped:
        assert not y.any(), told
