"""A monitor records each backward pass that clips, as it records a call that clips each layer."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gradclip
from gradclip.integrations.torch import clip_in_backward


def model():
    return torch.nn.ParameterDict({"v": torch.zeros(2), "w": torch.zeros(1)})


def backward(params, v=(3.0, 4.0), w=8.0):
    (params["v"] @ torch.tensor(v) + params["w"] * w).sum().backward()


def recorded(monitor):
    return [(step.norm, step.max_norm) for step in monitor.records]


@pytest.mark.parametrize("ord", [1, 2, math.inf])
def test_as_a_call_for_each_layer(ord):
    ours, theirs = gradclip.Monitor(layers_every=1), gradclip.Monitor(layers_every=1)
    params, thresholds = model(), {"v": 2.0, "w": 4.5}
    clipping = clip_in_backward(params, thresholds, ord=ord, monitor=ours)
    for scale in (1.0, 0.1):
        params.zero_grad()
        backward(params, (3.0 * scale, 4.0 * scale), 8.0 * scale)
        by_hand = model()
        backward(by_hand, (3.0 * scale, 4.0 * scale), 8.0 * scale)
        gradclip.clip_grad_layer_norm_(by_hand.named_parameters(), thresholds, ord=ord, monitor=theirs)
    assert recorded(ours) == recorded(theirs)
    assert [step.clipped for step in ours.records] == [True, False]
    assert ours.layers.names == theirs.layers.names
    assert ours.layers.norms.tolist() == theirs.layers.norms.tolist()
    clipping.remove()
    backward(params)
    assert ours.steps == 2


def test_accumulated_passes_are_steps():
    params, monitor = model(), gradclip.Monitor()
    clipping = clip_in_backward(params, {"v": 5.0, "w": 5.0}, monitor=monitor)
    backward(params, w=0.0)
    backward(params, w=0.0)
    params["v"].requires_grad_(False)
    backward(params, w=2.0)
    assert recorded(monitor) == [(5.0, 5.0), (10.0, 5.0), (2.0, 5.0)]
    assert (clipping.passes, monitor.num_clipped) == (3, 1)


def test_optimizers_that_step_in_the_pass_leave_no_gradients_behind():
    params, monitor = model(), gradclip.Monitor()
    clip_in_backward(params, {"v": 1.0, "w": 1.0}, monitor=monitor)

    def step(parameter):
        parameter.grad = None

    for parameter in params.values():
        parameter.register_post_accumulate_grad_hook(step)
    backward(params)
    assert recorded(monitor) == [(8.0, 1.0)]


@pytest.mark.parametrize(("policy", "skipped"), [("drop", 1), ("propagate", 0)])
def test_what_is_not_finite_is_counted(policy, skipped):
    params, monitor = model(), gradclip.Monitor()
    clip_in_backward(params, 1.0, nonfinite=policy, monitor=monitor)
    backward(params, w=math.nan)
    assert (monitor.steps, monitor.num_nonfinite, monitor.num_skipped) == (1, 1, skipped)


@pytest.mark.after_error
def test_a_pass_that_raises_is_no_step_and_names_its_gradient():
    params, monitor = model(), gradclip.Monitor()
    clip_in_backward(params, {"v": 9.0, "w": 9.0}, nonfinite="raise", monitor=monitor)
    for _ in range(3):
        params.zero_grad()
        backward(params)
    params.zero_grad()
    with pytest.raises(FloatingPointError, match="w"):
        backward(params, w=math.nan)
    params.zero_grad()
    backward(params, w=1.0)
    assert recorded(monitor) == [(8.0, 9.0)] * 3 + [(5.0, 9.0)]
    (spike,) = monitor.spikes
    assert (spike.raised, spike.layers[0].name) == (True, "w")


@pytest.mark.after_error
def test_passes_that_raise_leave_little_behind():
    params, monitor = model(), gradclip.Monitor()
    clipping = clip_in_backward(params, 9.0, monitor=monitor)

    def fail(_):
        raise KeyError("of the user")

    hook = params["v"].register_post_accumulate_grad_hook(fail)
    for _ in range(70):
        with pytest.raises(KeyError, match="of the user"):
            backward(params)
    assert len(clipping._watched._found) == 64
    hook.remove()
    params.zero_grad()
    backward(params)
    assert monitor.steps == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    """A reentrant checkpoint has a backward pass of its own, within that of the others."""
    net, monitor = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), gradclip.Monitor(layers_every=1)
    clipping = clip_in_backward(net, 1.0, monitor=monitor)
    x = torch.ones(1, 2, requires_grad=True)
    net[1](checkpoint(net[0], x, use_reentrant=reentrant)).sum().backward()
    assert monitor.steps == clipping.passes == (2 if reentrant else 1)
    names = {name for step in monitor.records for name in step.layers.names}
    assert names == set(dict(net.named_parameters()))


def test_norms_of_several_dtypes():
    params = {"v": torch.nn.Parameter(torch.zeros(2)), "w": torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))}
    monitor = gradclip.Monitor(layers_every=1)
    clip_in_backward(params, {"v": 1.0, "w": 1.0}, monitor=monitor)
    ((params["v"] * torch.tensor([3.0, 4.0])).sum() + (params["w"] * 8.0).sum()).backward()
    assert recorded(monitor) == [(8.0, 1.0)]


def test_one_monitor_follows_one_model():
    params, monitor = model(), gradclip.Monitor()
    first = clip_in_backward(params, 1.0, monitor=monitor)
    clip_in_backward(params, 1.0, monitor=monitor)  # takes all of them over
    with pytest.raises(ValueError, match="this Monitor already follows another"):
        clip_in_backward(model(), 1.0, monitor=monitor)
    with pytest.raises(TypeError, match="monitor must be a"):
        clip_in_backward(model(), 1.0, monitor=gradclip.Monitor)
    assert repr(first).endswith("removed)")
