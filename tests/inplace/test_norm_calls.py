"""Many small gradients: what Python does for each of them is counted, since it takes longer than to read them."""

import gc
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip


def calls(function):
    """Return how many Python functions are called."""
    count = 0

    def watch(frame, event, argument):
        nonlocal count
        count += event == "call"

    function()
    gc.disable()  # Libraries have functions that the collector calls, whenever it runs.
    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def parameters(number):
    made = [torch.nn.Parameter(torch.zeros(3)) for _ in range(number)]
    for parameter in made:
        parameter.grad = torch.tensor([3.0, 4.0, 12.0])
    return made


def holders(number):
    return [SimpleNamespace(grad=np.array([3.0, 4.0, 12.0], np.float32)) for _ in range(number)]


def tensors(number):
    return [torch.tensor([3.0, 4.0, 12.0]) for _ in range(number)]


CALLS = {
    "parameters, kept": (parameters, lambda ps: gradclip.clip_grad_norm_(ps, 1e9), 0),
    "parameters, clipped": (parameters, lambda ps: gradclip.clip_grad_norm_(ps, 1e-3), 0),
    "parameters, by value": (parameters, lambda ps: gradclip.clip_grad_value_(ps, 1.0), 0),
    "holders, kept": (holders, lambda ps: gradclip.clip_grad_norm_(ps, 1e9), 2),
    "holders, clipped": (holders, lambda ps: gradclip.clip_grad_norm_(ps, 1e-3), 2),
    "tensors by value": (tensors, lambda xs: gradclip.clip_by_value(xs, 1.0), 9),
}


@pytest.mark.parametrize(("make", "call", "each"), CALLS.values(), ids=CALLS)
def test_python_does_little_for_each_gradient(make, call, each):
    few, many = make(10), make(210)
    assert (calls(lambda: call(many)) - calls(lambda: call(few))) / 200 <= each
