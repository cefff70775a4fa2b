"""Norms of the kernels and of the portable operations on the same data, and the portable ones by hand."""

import math

import numpy as np
import pytest
import torch

from frameworks import DTYPES
from gradclip._src.backends.torch.device import Torch
from gradclip._src.backends.torch.host import TorchHost
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import FLOAT64
from gradclip._src.core.layouts import Groups
from gradclip._src.core.norms import EUCLIDEAN, Order, relative_error
from plain_backend import SIZES, Plain, norm_on, tensors

ORDERS = (1.0, 1.5, 2.0, 3.0, math.inf, -math.inf)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("order", ORDERS)
def test_norms_agree(dtype, size, order):
    tensor = tensors(dtype, size)
    fast = norm_on(TorchHost(), tensor, order)
    portable = norm_on(Torch(torch.device("cpu"), visible=True), tensor, order)
    # A sum by PyTorch may go through as many additions as there are terms. It goes through few.
    error = min(fast.error + portable.error, 2 * fast.error + 1e-14)
    assert float(portable.product()) == pytest.approx(float(fast.product()), rel=error + 1e-15)


def test_formats_are_split_by_range_and_joined():
    for scale in (1e-200, 1.0, 1e200):
        norm = Plain().norms(Arrays([np.float32([3.0]), np.array([4.0 * scale])]), EUCLIDEAN)
        assert float(norm.product()) == pytest.approx(math.hypot(3.0, 4.0 * scale), rel=norm.error)
    assert norm.divisor is not None


def test_many_groups_have_a_vector_of_norms():
    arrays = Arrays([np.array([3.0, 4.0]), np.array([]), np.array([5.0]), np.array([12.0])])
    norm = Plain().norms(arrays, Order(2.0), Groups([(0,), (1,), (2, 3)]))
    assert norm.product().tolist() == pytest.approx([5.0, 0.0, 13.0], rel=1e-14)
    error = relative_error(EUCLIDEAN, 2 * 2.0**-53, FLOAT64, exact=False)
    assert norm.error.tolist() == [error, 0.0, error]
    assert norm.floor == 0.0


def test_magnitudes_beyond_the_range_come_from_quarters():
    arrays = Arrays([np.array([1.5e308 + 1.5e308j])])

    class Joined(Plain):
        def complex(self, real, imag):
            return real + 1j * imag

    with np.errstate(over="ignore", invalid="ignore"):
        norm = Joined().norms(arrays, Order(1.0))
    assert norm.value * (norm.divisor / 2.0**1022) == pytest.approx(
        math.hypot(1.5, 1.5) * (1e308 / 2.0**1022), rel=1e-14
    )
