"""Thresholds that follow from parameters: never above the exact ones, near them, and 0 where numbers are too coarse."""

import math
from fractions import Fraction

import numpy as np
import pytest

from frameworks import ALL, by_name
from gradclip._src.backends.registry import find
from gradclip._src.core.decision import Clipping
from gradclip._src.core.holders import ALONE
from gradclip._src.core.layouts import units_along
from gradclip._src.core.nonfinite import PROPAGATE
from gradclip._src.core.norms import Order
from gradclip._src.core.pipeline import decide
from gradclip._src.core.rules import CLIP
from gradclip._src.core.units import Adaptive
from rational import power_of_norm

ROWS = units_along((0,))


def thresholds(framework, w, clipping, eps, order=2.0):
    def compute(w):
        backend = find([w], lambda: ["w"])
        with backend.precision():
            arrays = backend.enter([backend.prepare(w)])
            norm = backend.norms(arrays, Order(order), ROWS)
            found = Adaptive((clipping, eps)).of_norm(backend, norm, arrays, [])
            return backend.leave_scalar(found, "float64", [w]) if framework.name in ("numpy", "torch") else found * 1.0

    return np.asarray(framework.call(compute, w), np.float64)


@pytest.mark.parametrize("framework", ALL, ids=by_name)
@pytest.mark.parametrize(("clipping", "eps"), [(0.01, 1e-3), (0.3, 0.0), (3.0, 7.0), (1e-300, 1e-9), (1e300, 0.1)])
def test_thresholds_are_at_most_the_exact_ones(framework, clipping, eps):
    rng = np.random.default_rng(5)
    # MLX's devices may read numbers below the normal range as zero. A threshold allows for that.
    smallest = Fraction(2) ** (-160 if framework.name == "mlx-device" else -1980)
    for dtype in framework.dtypes:
        top = {"float16": 3, "float64": 290, "complex128": 290}.get(dtype, 30)
        values = rng.normal(size=(40, 3)) * 10.0 ** rng.uniform(-top, top, size=(40, 1))
        w = framework.array(values, dtype)
        found = thresholds(framework, w, clipping, eps)
        assert found.shape == (40,)
        for row, threshold in zip(framework.to_numpy(w), found, strict=True):
            exact = Fraction(clipping) ** 2 * max(power_of_norm([row], 2), Fraction(eps) ** 2)
            assert Fraction(float(threshold)) ** 2 <= exact
            if smallest < exact < Fraction(2) ** 2040:
                # The kernels add squares of half types in float32.
                assert Fraction(float(threshold)) ** 2 >= exact * (1 - Fraction(1, 10 ** (6 if "16" in dtype else 13)))


def test_thresholds_of_other_norms():
    w = np.array([[3.0, -4.0], [0.0, 0.0]])
    framework = ALL[0]
    for order, norm in ((1.0, 7.0), (math.inf, 4.0), (-math.inf, 3.0), (3.0, 91.0 ** (1 / 3))):
        assert thresholds(framework, w, 0.5, 0.25, order).tolist() == pytest.approx([norm / 2, 0.125], rel=1e-11)


def test_infinite_and_tiny_thresholds():
    w = np.array([[0.0], [1.0], [1e308], [np.inf], [np.nan]])
    framework = ALL[0]
    assert thresholds(framework, w, math.inf, 0.0).tolist() == [math.inf] * 5
    found = thresholds(framework, w, 1e-320, 0.0).tolist()
    assert found[:2] == [0.0, 0.0]
    assert 0.99e-12 <= found[2] <= 1e-12
    assert math.isnan(found[4])
    assert thresholds(framework, np.full((1, 9), 1e308), 2.0, 0.0).tolist() == [np.finfo(np.float64).max]


@pytest.mark.parametrize("framework", ALL, ids=by_name)
def test_an_infinite_eps_clips_nothing_but_what_a_clipping_of_zero_clips(framework):
    w = framework.array(np.array([[0.0], [1.0], [np.nan]]), "float32")
    assert np.array_equal(thresholds(framework, w, 0.0, math.inf), [0.0, 0.0, math.nan], equal_nan=True)
    assert (thresholds(framework, w, 1e-20, math.inf)[:2] > 1e38).all()


def test_units_that_are_undecided_are_compared_exactly():
    x = np.array([[3.0, 4.0], [0.1, 0.2], [0.0, 0.0], [1.0, np.nan]])
    backend = find([x], lambda: ["x"])
    norm = float(np.sqrt(0.1**2 + 0.2**2))
    least = [norm, np.nextafter(norm, 1.0)][Fraction(norm) ** 2 < power_of_norm([x[1]], 2)]
    clipping = Clipping(np.array([5.0, least, 0.0, 9.0]), Order(2.0), PROPAGATE, CLIP)
    with backend.precision():
        made = decide(backend, backend.enter([x]), clipping, lambda: ["x"], layout=ROWS, holders=ALONE)
    assert made.coefficient.keep.tolist() == [True, True, True, False]
    below = Clipping(np.array([5.0, np.nextafter(least, 0.0), 0.0, 9.0]), Order(2.0), PROPAGATE, CLIP)
    with backend.precision():
        made = decide(backend, backend.enter([x]), below, lambda: ["x"], layout=ROWS, holders=ALONE)
    assert made.coefficient.keep.tolist() == [True, False, True, False]


def test_an_array_may_be_one_unit():
    x = np.array([[3.0, 4.0]])
    backend = find([x], lambda: ["x"])
    with backend.precision():
        for scope, keep in ((units_along(()), True), (units_along((0, 1)), [[True, True]])):
            asked = Clipping(5.0, Order(2.0), PROPAGATE, CLIP)
            made = decide(backend, backend.enter([x]), asked, lambda: ["x"], layout=scope, holders=ALONE)
            assert made.coefficient.keep.tolist() == keep
