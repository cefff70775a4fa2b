"""Gradients of PyTorch as they lie on a device, and how many operations calls on them take."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from frameworks import ALL

DEVICE = next(f for f in ALL if f.name == "torch-device")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = [(40, 30), (30,), (30, 7), ()] * 5


class Count(TorchDispatchMode):
    """Counts operations, without views; raises where one waits."""

    def __init__(self):
        super().__init__()
        self.operations = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func)
        if not func.is_view:
            self.operations[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def total(self):
        return sum(self.operations.values())


def leaves_of(seed, dtype, scale=1.0):
    rng = np.random.default_rng(seed)
    parts = (
        (lambda s: rng.standard_normal(s) + 1j * rng.standard_normal(s)) if dtype.is_complex else rng.standard_normal
    )
    return [torch.tensor(parts(shape) * scale).to(dtype) for shape in SHAPES]


def held(leaves):
    return [SimpleNamespace(grad=x.clone()) for x in leaves]


def grads(holders):
    return [one.grad for one in holders]


def exact(leaves):
    return [(x.to(torch.complex128) if x.is_complex() else x.double()).numpy() for x in leaves]
