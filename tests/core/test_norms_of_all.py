"""The norm of gradients of which each has a known norm."""

import math

import numpy as np
import pytest
import torch

from gradclip._src.core.norms import Order, of_all, of_numbers

CASES = [
    ([3.0, 4.0], 2, 5.0),
    ([3.0, 4.0], 1, 7.0),
    ([3.0, 4.0], 3, 91 ** (1 / 3)),
    ([3.0, 4.0], math.inf, 4.0),
    ([3.0, 4.0], -math.inf, 3.0),
    ([0.0, 0.0], 2, 0.0),
    ([0.0, 0.0], 3, 0.0),
    ([3e300, 4e300], 2, 5e300),
    ([3e300, 4e300], 3, 91 ** (1 / 3) * 1e300),
    ([3e-300, 4e-300], 2, 5e-300),
    ([3e-300, 4e-300], 1.5, (3**1.5 + 8.0) ** (1 / 1.5) * 1e-300),
    ([math.inf, 1.0], 2, math.inf),
    ([math.inf, 1.0], 3, math.inf),
    ([math.nan, 1.0], 2, math.nan),
    ([1.0, math.nan], 3, math.nan),
]


@pytest.mark.parametrize(("norms", "ord", "expected"), CASES)
def test_the_norm_of_all(norms, ord, expected):
    order = Order(float(ord))
    near = pytest.approx(expected, rel=1e-14, nan_ok=True)
    assert of_numbers(norms, order) == near
    with np.errstate(all="ignore"):
        assert float(of_all(np, np.array(norms), order)) == near
    from array_api_compat import torch as xp

    assert float(of_all(xp, torch.tensor(norms, dtype=torch.float64), order)) == near


def test_none_have_the_norm_zero():
    for p in (1, 2, 3, math.inf, -math.inf):
        assert of_numbers([], Order(float(p))) == 0.0
