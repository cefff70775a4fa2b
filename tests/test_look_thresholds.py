"""Thresholds that are arrays: what is wrong with them is said as for numbers."""

import math

import numpy as np
import pytest
import torch

import gradclip


def parameter(grad):
    made = torch.nn.Parameter(torch.zeros_like(grad))
    made.grad = grad
    return made


@pytest.mark.parametrize("max_norm", [torch.tensor(-1.0), np.float32(math.nan), torch.tensor(True)], ids=repr)
def test_wrong_thresholds_in_arrays_are_refused(max_norm):
    given = [parameter(torch.ones(3))]
    with pytest.raises((ValueError, TypeError), match="max_norm must"):
        gradclip.clip_grad_norm_(given, max_norm)
    assert given[0].grad.tolist() == [1.0] * 3


def test_errors_come_in_the_usual_order():
    for given in ([parameter(torch.ones(3))], {"a": np.ones(3)}):
        with pytest.raises(ValueError, match="ord must"):
            gradclip.clip_grad_norm_(given, torch.tensor(-1.0), ord="x")
