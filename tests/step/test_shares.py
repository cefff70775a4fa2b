"""Shares of a threshold never add up to more."""

import math

import numpy as np
import pytest

from gradclip._src.core.norms import Order
from gradclip._src.step.shares import shares
from rational import at_most


@pytest.mark.parametrize("p", [1, 2, 3, math.inf])
def test_powers_of_shares_add_up_to_at_most_that_of_the_threshold(p):
    rng = np.random.default_rng(1)
    thresholds = [*10.0 ** rng.uniform(-30, 30, 500), 5e-324, 1e-320, 1e308]
    for threshold in map(float, thresholds):
        sizes = {str(i): int(size) for i, size in enumerate(rng.integers(0, 10**6, size=rng.integers(1, 9)) + 1)}
        found = list(shares(threshold, sizes, float(p)).values())
        assert at_most([np.array(found)], p, threshold)
        if threshold > 1e-300:
            assert not at_most([np.array(found)], p, threshold * (1 - 1e-13))


def test_shares_of_nothing():
    assert shares(1.0, {"a": 0, "b": 0}, 2.0) == {"a": 0.0, "b": 0.0}
    assert shares(math.inf, {"a": 0, "b": 1}, 2.0) == {"a": math.inf, "b": math.inf}
    assert shares(1.0, {"a": 0, "b": 0}, Order(math.inf).p) == {"a": 1.0, "b": 1.0}
