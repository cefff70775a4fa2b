"""The fast path and the portable path on the same data, for every dtype, and float32-only devices."""

import numpy as np
import pytest
import torch

from frameworks import DTYPES
from gradclip._src.backends.torch.device import Torch
from gradclip._src.backends.torch.host import TorchHost
from gradclip._src.core.coefficient import coefficient
from gradclip._src.core.formats import FLOAT32
from gradclip._src.core.layouts import TREE
from gradclip._src.core.norms import Norm
from plain_backend import SIZES, norm_on, tensors


class NarrowDevice(Torch):
    """CPU tensors standing for a device without float64."""

    def __init__(self):
        super().__init__(torch.device("cpu"), visible=True)
        self.wide = FLOAT32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_shrunk_arrays_are_the_same_bits(dtype, size):
    tensor = tensors(dtype, size, 2.0)
    fast, portable = TorchHost(), Torch(torch.device("cpu"), visible=True)
    norm = norm_on(fast, tensor, 2.0)
    with np.errstate(all="ignore"):
        chosen = coefficient(fast, norm, np.float64(0.25), split=dtype in ("float64", "complex128"))
    with portable.precision():
        portable_norm = Norm(torch.as_tensor(norm.value), None, norm.error, norm.floor)
        threshold = torch.tensor(0.25, dtype=torch.float64)
        as_tensors = coefficient(portable, portable_norm, threshold, split=dtype in ("float64", "complex128"))
    assert bool(as_tensors.keep) == bool(chosen.keep)
    assert chosen.keep or float(as_tensors.wide.first) == chosen.wide.first
    one = fast.leave(fast.scale(fast.enter([tensor]), chosen, TREE)[0], tensor)
    other = portable.shrunk(tensor, as_tensors, TREE)
    assert one.view(torch.uint8 if size else one.dtype).equal(other.view(torch.uint8 if size else other.dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-5, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("size", [1, 16, 17, 4097])
def test_devices_without_float64_keep_error_and_bound(dtype, scale, size):
    if dtype == "float16" and not 1e-6 < scale < 1e6:
        scale = 1.0
    tensor = tensors(dtype, size, scale)
    exact = norm_on(TorchHost(), tensor, 2.0)
    device = NarrowDevice()
    norm = norm_on(device, tensor, 2.0)
    true = float(exact.product())
    assert float(norm.product()) == pytest.approx(true, rel=min(norm.error, 1e-6), abs=2.0**-126)
    threshold = torch.tensor(true / 3, dtype=torch.float32)
    with device.precision():
        chosen = coefficient(device, norm, threshold, split=True)
        clipped = device.shrunk(tensor, chosen, TREE)
    after = float(norm_on(TorchHost(), clipped, 2.0).product())
    assert after <= float(threshold)
    if float(threshold) > 1e-30 and dtype in ("float32", "complex64"):
        assert after >= (1 - 1e-5) * float(threshold)
