"""Calls where no parameter has a gradient: they warn at the line that calls, and Python shows that once."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip
from gradclip.integrations import torch as drop_ins

CALLS = {
    "grad_norm": gradclip.grad_norm,
    "clip_grad_norm_": lambda p: gradclip.clip_grad_norm_(p, 1.0),
    "adaptive": lambda p: gradclip.clip_grad_norm_(p, gradclip.AdaptiveThreshold()),
    "monitored": lambda p: gradclip.clip_grad_norm_(p, 1.0, monitor=gradclip.Monitor()),
    "clip_grad_value_": lambda p: gradclip.clip_grad_value_(p, 1.0),
    "clip_grad_layer_norm_": lambda p: gradclip.clip_grad_layer_norm_(p, 1.0),
    "clip_grad_unit_norm_": lambda p: gradclip.clip_grad_unit_norm_(p, 1.0),
    "clip_grads_with_norm_": lambda p: drop_ins.clip_grads_with_norm_(p, 1.0, torch.tensor(2.0)),
    "drop-in": lambda p: drop_ins.clip_grad_norm_(p, 1.0),
}
WITHOUT = {
    "torch": lambda: [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)],
    "holders": lambda: [SimpleNamespace(grad=None)],
    "groups": lambda: [{"params": [torch.nn.Parameter(torch.ones(2))]}],
    "a generator": lambda: torch.nn.Linear(2, 2).parameters(),
}


@pytest.mark.parametrize("make", WITHOUT.values(), ids=WITHOUT)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_gradient_at_all_is_a_warning(call, make):
    with pytest.warns(UserWarning, match=r"no parameter has a gradient.*clip_in_backward") as seen:
        call(make())
    assert [warning.filename for warning in seen] == [__file__]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_one_gradient_is_enough(call):
    parameters = WITHOUT["torch"]()
    parameters[0].grad = torch.zeros(2)
    call(parameters)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("empty", [[], {}, ()])
def test_an_empty_list_is_not(call, empty):
    call(empty)


def test_a_tree_without_elements_is_no_warning():
    assert gradclip.grad_norm({"w": np.empty(0)}) == 0.0


def test_python_shows_it_once_for_each_line():
    code = """if True:
        import gradclip
        from types import SimpleNamespace
        for _ in range(3):
            gradclip.clip_grad_norm_([SimpleNamespace(grad=None)], 1.0)
        for _ in range(3):
            gradclip.clip_grad_value_([SimpleNamespace(grad=None)], 1.0)
    """
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert shown.count("no parameter has a gradient") == 2
