"""A backend with nothing but the portable operations, and PyTorch tensors to try backends on."""

import numpy as np
import torch
from array_api_compat import numpy as namespace

from frameworks import numpy_dtype
from gradclip._src.backends.portable import Portable
from gradclip._src.core.formats import FLOAT64
from gradclip._src.core.norms import Order

SIZES = (0, 1, 15, 16, 17, 32767, 32769, 65537)


class Plain(Portable):
    """The portable operations, on NumPy arrays."""

    def __init__(self):
        super().__init__(namespace, FLOAT64)

    def leave(self, array, leaf):
        return array

    def leave_sum(self, wide, x, dtype):
        return wide


def tensors(dtype, size, scale=1.0):
    """Return a tensor of normal numbers."""
    rng = np.random.default_rng(size)
    x = rng.normal(size=size) * scale
    values = x + 1j * x[::-1] if "complex" in dtype else x
    if dtype == "bfloat16":
        return torch.from_numpy(values).to(torch.bfloat16)
    return torch.from_numpy(values.astype(numpy_dtype(dtype)))


def norm_on(backend, tensor, order):
    """Return the norm of a tensor as a backend computes it."""
    with backend.precision():
        return backend.norms(backend.enter([backend.prepare(tensor)]), Order(order))
