"""Time in-place clipping of PyTorch CPU tensors and NumPy arrays, compared with a replaced library and the floor."""

import math

import numpy as np
import torch
from declearn.model.sklearn import NumpyVector
from declearn.optimizer.modules import L2GlobalClipping
from floor import Floor

import gradclip

CASES = ("not clipped", "clipped")


class Threshold:
    """A threshold that no norm reaches, or one that is below the norm at every call.

    It falls between calls by more than the rounding of half types. Only after many calls must the gradients be made
    larger again, so nearly every call sees the gradients that the previous call left.
    """

    def __init__(self, case, grads, elements):
        self._grads = grads
        self._first = math.sqrt(elements) / 2
        self.value = self._first if case == "clipped" else 1e9

    def fall(self):
        self.value *= 0.97
        if self.value < self._first / 16:
            self.value *= 16
            for grad in self._grads:
                grad *= 16


def parameters_of(shapes, dtype):
    """Return parameters with standard normal gradients."""
    parameters = [torch.nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(dtype)
    return parameters


def torch_contenders(parameters, case):
    grads = [parameter.grad for parameter in parameters]
    threshold = Threshold(case, grads, sum(grad.numel() for grad in grads))
    floor = Floor([grad.data_ptr() for grad in grads], [grad.nbytes for grad in grads], torch.get_num_threads())
    ours, theirs = gradclip.clip_grad_norm_, torch.nn.utils.clip_grad_norm_
    calls = {
        "gradclip.clip_grad_norm_": lambda: ours(parameters, threshold.value),
        "torch.nn.utils.clip_grad_norm_": lambda: theirs(parameters, threshold.value),
    }
    return _with_floor(floor, calls, case, threshold)


def numpy_contenders(shapes, case):
    arrays = {f"{i}": np.random.default_rng(i).standard_normal(s, np.float32) for i, s in enumerate(shapes)}
    grads = list(arrays.values())
    threshold = Threshold(case, grads, sum(grad.size for grad in grads))
    floor = Floor([grad.ctypes.data for grad in grads], [grad.nbytes for grad in grads], torch.get_num_threads())
    vector = NumpyVector(arrays)
    calls = {
        "gradclip.clip_grad_norm_": lambda: gradclip.clip_grad_norm_(arrays, threshold.value),
        "declearn L2GlobalClipping": lambda: L2GlobalClipping(max_norm=threshold.value).run(vector),
    }
    return _with_floor(floor, calls, case, threshold)


def _with_floor(floor, calls, case, threshold):
    if case == "not clipped":
        return {"floor": floor.read} | calls
    return {"floor": floor.read_and_rewrite} | {name: (call, threshold.fall) for name, call in calls.items()}
