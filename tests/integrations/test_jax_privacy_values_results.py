"""The bound on what one example adds."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradclip.integrations._jax_privacy_values import bound_of
from gradclip.integrations.jax_privacy import clipped_fun


@pytest.mark.parametrize(
    ("thresholds", "to_unit", "expected"),
    [
        (3.0, False, 3.0),
        (3.0, True, 1.0),
        ({"a": 3.0, "b": 4.0}, False, 5.0),
        ({"a": np.array(3.0), "b": jnp.array(4.0)}, False, 5.0),
        ({"a": 3.0, "b": (4.0, None)}, True, math.nextafter(math.sqrt(2.0), 0) if math.sqrt(2.0) ** 2 < 2 else None),
        ({"a": 3.0, "b": math.inf}, False, math.inf),
        ([7.0], True, 1.0),
    ],
)
def test_bounds(thresholds, to_unit, expected):
    found = bound_of(thresholds, to_unit=to_unit)
    if expected is not None:
        assert found == expected
    else:
        assert 2 <= Fraction(found) ** 2 <= 2 + Fraction(1, 10**15)


def test_a_bound_is_rounded_up():
    thresholds = {"a": 0.1, "b": 0.2, "c": 0.3}
    exact = sum(Fraction(c) ** 2 for c in thresholds.values())
    assert exact <= Fraction(bound_of(thresholds, to_unit=False)) ** 2 <= exact * (1 + Fraction(1, 10**15))


@pytest.mark.parametrize("threshold", [1.0, 0.1, np.float32(0.1), jnp.float32(0.1), {"a": jnp.float32(0.1)}])
def test_a_bound_that_is_divided_is_rounded_up(threshold):
    (number,) = jax.tree.leaves(threshold)
    for divisor in range(1, 50):
        found = clipped_fun(lambda x: x, l2_clip_norm=threshold, normalize_by=divisor).l2_norm_bound
        exact = Fraction(float(number)) / divisor
        assert exact <= Fraction(found) <= exact * (1 + Fraction(1, 2**52))
    assert clipped_fun(lambda x: x, l2_clip_norm=math.inf, normalize_by=3.0).l2_norm_bound == math.inf


def test_a_bound_may_be_traced():
    bound = jax.jit(lambda c: clipped_fun(lambda x: x, l2_clip_norm={"a": c, "b": 4.0}).l2_norm_bound)(3.0)
    assert float(bound) == 5.0
    assert float(jax.jit(lambda c: clipped_fun(lambda x: x, l2_clip_norm=c).l2_norm_bound)(3.0)) == 3.0


def test_the_function_under_both_names():
    made = clipped_fun(lambda x: x, l2_clip_norm=1.0)
    assert made.bounded_sensitivity_fun is made.fun
