"""Calls that clip in place are announced to those who listen."""

import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.core import announced
from gradclip._src.inplace.norm import clip_grads_with_norm_
from gradclip.integrations import torch as drop_in


@pytest.fixture
def heard():
    calls = []
    announced.listeners.append(calls.append)
    yield calls
    announced.listeners.remove(calls.append)


def weight():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    return parameter


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (gradclip.clip_grad_norm_, {"max_norm": 1.0, "nonfinite": "drop"}),
        (gradclip.clip_grad_value_, {"clip_value": 1.0}),
        (gradclip.clip_grad_layer_norm_, {"max_norm": 1.0}),
        (gradclip.clip_grad_unit_norm_, {"max_norm": 1.0}),
        (gradclip.adaptive_grad_clip_, {"clipping": 0.5}),
        (clip_grads_with_norm_, {"max_norm": 1.0, "total_norm": 5.0}),
    ],
)
def test_what_was_passed_and_what_came_back(heard, function, arguments):
    parameter = weight()
    result = function([parameter], **arguments)
    (call,) = heard
    assert (call.function, call.result is result) == (function.__name__, True)
    assert {name: call.arguments[name] for name in arguments} == arguments
    assert call.arguments["parameters"][0] is parameter


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (drop_in.clip_grad_norm_, (1.0,)),
        (drop_in.clip_grad_value_, (1.0,)),
        (drop_in.clip_grads_with_norm_, (1.0, torch.tensor(5.0))),
    ],
)
def test_functions_that_call_another_one_announce_once(heard, function, arguments):
    function([weight()], *arguments)
    assert [call.function for call in heard] == [function.__name__]


@pytest.mark.parametrize("settings", [{}, {"monitor": gradclip.Monitor()}, {"nonfinite": "drop"}])
def test_several_thresholds_are_one_call(heard, settings):
    groups = [{"params": [weight()]}, {"params": [weight()], "max_norm": gradclip.AdaptiveThreshold()}]
    gradclip.clip_grad_norm_(groups, 1.0, **settings)
    gradclip.clip_grad_norm_({"a": weight(), "b": weight()}, {"a": 1.0, "*": None}, **settings)
    assert [call.function for call in heard] == ["clip_grad_norm_"] * 2


@pytest.mark.parametrize("by_name", [True, False])
def test_an_iterator_is_listed_and_still_clipped(heard, by_name):
    parameter = weight()
    norm = gradclip.clip_grad_norm_(parameters=iter([parameter]), max_norm=1.0) if by_name else None
    norm = norm if by_name else gradclip.clip_grad_norm_(iter([parameter]), 1.0)
    assert (float(norm), heard[0].arguments["parameters"]) == (5.0, [parameter])
    assert parameter.grad.norm() <= 1.0


@pytest.mark.after_error
def test_a_call_that_fails_is_not_announced(heard):
    parameter = weight()
    with pytest.raises(ValueError, match="negative"):
        gradclip.clip_grad_norm_([parameter], -1.0)
    with pytest.raises(ValueError, match="used up"):
        gradclip.clip_grad_norm_(iter(()), 1.0)
    with pytest.raises(TypeError, match="max_norm"):
        gradclip.clip_grad_norm_([parameter])
    assert heard == []
    assert parameter.grad.tolist() == [3.0, 4.0]


def test_functional_calls_and_norms_are_not(heard):
    gradclip.clip_by_global_norm(np.ones(3), 1.0)
    gradclip.grad_norm([weight()])
    assert heard == []


def test_one_that_stops_listening_keeps_no_other_from_hearing(heard):
    def once(call):
        announced.listeners.remove(once)

    announced.listeners.insert(0, once)
    gradclip.clip_grad_norm_([weight()], 1.0)
    assert once not in announced.listeners
    assert len(heard) == 1
