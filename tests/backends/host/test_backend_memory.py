"""What only arrays in host memory offer, of NumPy and PyTorch."""

import numpy as np
import pytest
import torch

from gradclip._src.backends.host.backend import HOST
from gradclip._src.backends.torch.framework import HOST as TORCH_HOST


def test_the_kernels_know_plain_arrays_of_numpy():
    assert HOST.known([np.ones(3), np.ones((2, 2), np.float16)]).counts == [3, 4]


@pytest.mark.parametrize(
    "array",
    [
        np.ones(2, int),
        np.ones(2, np.uint16),
        np.ones(2, ">f8"),
        np.ones(2, complex),
        np.float64(1.0),
        np.ones((4, 4))[::2, ::2],
        np.ma.masked_array(np.ones(2), [True, False]),
        [1.0, 2.0],
    ],
    ids=lambda array: f"{type(array).__name__}-{getattr(array, 'dtype', '')}-{getattr(array, 'shape', '')}",
)
def test_what_is_not_plain_is_not_known(array):
    assert HOST.known([np.ones(3), array]) is None


def test_whether_arrays_lie_in_order_and_can_be_written_is_known():
    read_only = np.ones(3)
    read_only.flags.writeable = False
    square = np.ones((2, 3))
    for arrays, in_order, writable in (
        ([square], True, True),
        ([square, square.T], False, True),
        ([square[::-1]], False, True),
        ([np.ones((1, 3)).T], True, True),
        ([np.ones((0, 3)).T], True, True),
        ([square, read_only], True, False),
    ):
        known = HOST.known(arrays)
        assert (known.in_order, known.writable) == (in_order, writable)
    assert not TORCH_HOST.known([torch.ones(2, 3).T]).in_order
    assert TORCH_HOST.known([torch.ones(2, 3)]).in_order


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize(("host", "array"), [(HOST, np.arange(6.0).reshape(2, 3)), (TORCH_HOST, torch.arange(6.0))])
def test_new_arrays_share_no_memory(host, array, copied):
    (new,) = host.new_like([array], copied=copied)
    assert type(new) is type(array)
    assert (new.shape, new.dtype) == (array.shape, array.dtype)
    assert not host.known([new, array]).overlap()
    assert not copied or (new == array).all()


def test_numbers_and_arrays_are_rounded_to_nearest():
    for dtype in ("float32", "float64"):
        assert HOST.number(0.1, dtype) == TORCH_HOST.number(0.1, dtype).item() == getattr(np, dtype)(0.1)
        values = np.array([0.1, 1e-40])
        assert (HOST.array(values, dtype) == TORCH_HOST.array(values, dtype).numpy()).all()
