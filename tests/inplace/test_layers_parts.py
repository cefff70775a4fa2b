"""Gradients with several norms: everything is decided before the first is written."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip


@pytest.mark.parametrize("call", [gradclip.clip_grad_layer_norm_, gradclip.clip_grad_unit_norm_])
def test_nothing_is_written_where_one_part_raises(call):
    grads = [np.full((2, 2), value) for value in (3.0, math.nan, 3.0)]
    holders = [SimpleNamespace(grad=grad) for grad in grads]
    with pytest.raises(FloatingPointError, match=r"parameters\[1\].grad: 4 NaN"):
        call(holders, 0.1, nonfinite="raise")
    assert [grad[0, 0] for grad in grads] == [3.0, pytest.approx(math.nan, nan_ok=True), 3.0]


def test_a_threshold_in_a_tensor_is_read_once_for_all():
    grads = [torch.full((3,), float(value)) for value in (1, 2, 3)]
    holders = [SimpleNamespace(grad=grad) for grad in grads]
    norms = gradclip.clip_grad_layer_norm_(holders, torch.tensor(2.0))
    assert [round(float(norm), 4) for norm in norms] == [1.7321, 3.4641, 5.1962]
    assert [round(float(grad.norm()), 4) for grad in grads] == [1.7321, 2.0, 2.0]
