"""Norms of complex numbers, and of orders that are not integers, beside thresholds that they equal or nearly equal."""

import math

import numpy as np
import pytest

import gradclip
from frameworks import ALL, by_name
from gradclip._src.backends.host import exact
from gradclip._src.backends.host.backend import HOST

HOSTS = [f for f in ALL if f.name in ("numpy", "torch", "jax", "tensorflow")]

# Numbers, the order, and the norm.
EQUAL = [
    ([3 + 4j], 1.0, 5.0),
    ([3 + 4j, -5 + 12j, 0j, -8j], 1.0, 26.0),
    ([(3 - 4j) * 2.0**-1000, (4 + 3j) * 2.0**-1000], 1.0, 10 * 2.0**-1000),
    ([(3 - 4j) * 2.0**1000, (4 + 3j) * 2.0**1000], 1.0, 10 * 2.0**1000),
    ([3 + 4j] * 8, 3.0, 10.0),
    ([1 + 1j] * 4, 4.0, 2.0),
    ([3 + 4j] * 32, 2.5, 20.0),
    ([1.0] * 8, 1.5, 4.0),
    ([-0.25, 0.0, 0.25] * 4, 1.5, 1.0),
    ([1.0] * 1024, 2.5, 16.0),
    ([2.5], 1.1, 2.5),
]


def decide(values, p, threshold):
    x = np.array(values)
    with HOST.precision():
        answers = {exact.at_most(HOST, HOST.enter(a), p, threshold) for a in ([x], [x[:1], x[1:]], [x.repeat(2)[::2]])}
    (answer,) = answers
    return answer


@pytest.mark.parametrize(("values", "p", "norm"), EQUAL)
def test_a_norm_that_equals_the_threshold_is_at_most_it(values, p, norm):
    assert decide(values, p, norm)
    assert decide([*values, 0.0], p, norm)
    assert not decide(values, p, math.nextafter(norm, 0))
    assert not decide([*values, 5e-324], p, norm)
    assert not decide([*values, *values], p, norm)


def test_a_magnitude_may_be_longer_than_any_float():
    long = 2.0**30 + 1 + 1j * (2.0**59 + 2.0**30)  # its magnitude is 2**59 + 2**30 + 1
    assert decide([long], 1.0, math.nextafter(2.0**59 + 2.0**30, math.inf))
    assert decide([long] * 256, 1.0, 2.0**67 + 2.0**38 + 2.0**15)
    assert not decide([long] * 256, 1.0, 2.0**67 + 2.0**38)


def test_what_is_irrational_stays_open_unless_it_is_alone():
    assert decide([1 + 1j], 1.0, math.nextafter(math.sqrt(2), 2))
    assert not decide([1 + 1j], 1.0, math.nextafter(math.sqrt(2), 0))
    assert not decide([1 + 1j] * 2, 1.0, 2.9)
    assert not decide([3 + 4j, 1 + 1j], 1.0, 6.5)
    assert not decide([2.0, 2.0], 1.5, 3.2)


@pytest.mark.parametrize("values", [[1.0] * 2, [3 + 4j] * 2])
@pytest.mark.parametrize("p", [1e6 + 0.5, 1e300, 1.1])
def test_long_powers_stay_open(values, p):
    assert not decide(values, p, 6.0)


def test_many_different_numbers_stay_open():
    assert decide(np.arange(1.0, 2000.0) ** 2, 1.5, 2.0**64)
    assert not decide(np.arange(1.0, 4000.0) ** 2, 1.5, 2.0**64)


@pytest.mark.parametrize("framework", HOSTS, ids=by_name)
@pytest.mark.parametrize(
    ("values", "ord", "norm"), [([3 + 4j, 12 - 5j], 1, 18), ([0.25] * 8, 1.5, 1), ([3 + 4j] * 8, 3, 10)]
)
def test_gradients_whose_norm_equals_the_threshold_are_kept(framework, values, ord, norm):
    for dtype in ["complex64"] if isinstance(values[0], complex) else ["float32", "float16"]:
        leaf = np.array(values).astype(dtype)
        for clip in (gradclip.clip_by_global_norm, gradclip.clip_by_layer_norm):
            kept = clip([framework.from_numpy(leaf.copy())], norm, ord=ord)[0]
            clipped = clip([framework.from_numpy(leaf.copy())], norm * (1 - 1e-6), ord=ord)[0]
            assert framework.to_numpy(kept[0]).tobytes() == leaf.tobytes()
            assert framework.to_numpy(clipped[0]).tobytes() != leaf.tobytes()
        rows = gradclip.clip_by_unit_norm(
            [framework.from_numpy(np.stack([leaf, 2 * leaf]))], norm, unit_axis=0, ord=ord
        )[0]
        assert framework.to_numpy(rows[0])[0].tobytes() == leaf.tobytes()
