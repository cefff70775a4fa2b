"""Clipping within steps and within the backward pass: weights are those of clipping by hand, then a plain step."""

import math
from functools import partial

import numpy as np
import pytest
import torch

import gradclip
from gradclip import clip_at_step
from gradclip.integrations.torch import clip_in_backward
from on_gpu import DEVICE, ON, batches, check_weights, loss_of, moved, network, numbers, on_host, trained_on_host
from rational import at_most

pytestmark = pytest.mark.gpu
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=0.02, eps=1e-2),
    "AdamW": partial(torch.optim.AdamW, lr=0.02, eps=1e-2, weight_decay=0.1),
}
KINDS = ("fused", "foreach", "plain")
MAX_NORM = 0.7


def settings_of(kind):
    return {"foreach": False} if kind == "plain" else {kind: True}


def steps_of(model, optimizer, inputs, clipping):
    norms = []
    for x in inputs:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        norms.append(clipping.norm)
    return list(map(float, norms))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights(name, kind):
    model, inputs = network(), batches(6)
    optimizer = OPTIMIZERS[name](model.parameters(), **settings_of(kind))
    clipping = clip_at_step(optimizer, MAX_NORM)
    norms = steps_of(model, optimizer, inputs, clipping)
    wanted, known = trained_on_host(OPTIMIZERS[name], MAX_NORM, inputs)
    assert norms == pytest.approx(known, rel=1e-4)
    assert max(known) > MAX_NORM
    check_weights(model, wanted)
    assert float(clipping.numbers()["grad_norm_clipped"]) <= MAX_NORM * (1 + 1e-6)
    clipping.remove()


def folded_descent(dtype, size):
    """Take a step of SGD at a rate of 1 from zeros, and return the gradient, the weight, and what clips."""
    (grad,) = moved([torch.linspace(-1.0, 3.0, size).to(dtype)])
    weight = torch.nn.Parameter(torch.zeros(size, dtype=dtype, device=DEVICE))
    weight.grad = grad.clone()
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    clipping = clip_at_step(optimizer, 0.5, fused=True)
    with ON.waiting_is_an_error():
        optimizer.step()
    exact = math.sqrt(float((grad.double() ** 2).sum()))
    assert float(clipping.norm) == pytest.approx(exact, rel=1e-6)
    return on_host([grad])[0] * (0.5 / exact), weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 17, 70_001])
def test_the_bound_of_what_a_fused_step_uses(dtype, size):
    """The weights are what the update used."""
    wanted, weight = folded_descent(dtype, size)
    np.testing.assert_allclose(on_host([weight])[0], -wanted, rtol=1e-5, atol=1e-9)
    assert at_most(on_host([weight]), 2, 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [17, 70_001])
def test_a_fused_step_of_half_types(dtype, size):
    """What it used is left in `.grad`, rounded to nearest. The CPU's fused SGD does not write such weights."""
    wanted, weight = folded_descent(dtype, size)
    np.testing.assert_allclose(on_host([weight.grad])[0], wanted, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["skip", "propagate"])
def test_what_is_not_finite(kind, policy):
    weight = torch.nn.Parameter(torch.ones(2, device=DEVICE))
    optimizer = torch.optim.Adam([weight], lr=0.1, **settings_of(kind))
    clip_at_step(optimizer, 1.0, nonfinite=policy)
    for values in ((3.0, 4.0), (math.nan, 1.0), (3.0, math.inf)):
        weight.grad = numbers(*values)
        optimizer.step()
    if policy == "skip":
        np.testing.assert_allclose(on_host([weight])[0], [0.9, 0.9], rtol=1e-5)
        assert float(optimizer.state[weight]["step"]) == 1.0
    else:
        assert weight.isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_raise_leaves_the_weights(kind):
    weight = torch.nn.Parameter(torch.ones(2, device=DEVICE))
    optimizer = torch.optim.SGD([weight], lr=0.1, **settings_of(kind))
    clip_at_step(optimizer, 1.0, nonfinite="raise")
    weight.grad = numbers(math.nan, 1.0)
    with pytest.raises(FloatingPointError):
        optimizer.step()
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_an_adaptive_threshold_that_skips(kind):
    weight = torch.nn.Parameter(torch.zeros(2, device=DEVICE))
    optimizer = torch.optim.SGD([weight], lr=1.0, **settings_of(kind))
    clipping = clip_at_step(optimizer, gradclip.AdaptiveThreshold(skip_above=4.0))
    for scale in (1.0, 100.0, 1.0):
        weight.grad = numbers(3.0, 4.0) * scale
        optimizer.step()
    assert (clipping.max_norm.steps, clipping.max_norm.num_skipped) == (3, 1)
    np.testing.assert_allclose(on_host([weight])[0], [-6.0, -8.0], rtol=1e-5)


def test_groups_with_thresholds_of_their_own():
    first, second, third = (torch.nn.Parameter(torch.zeros(2, device=DEVICE)) for _ in range(3))
    groups = [{"params": [first], "max_norm": 2.0}, {"params": [second]}, {"params": [third], "max_norm": None}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    clipping = clip_at_step(optimizer, 1.0)
    first.grad, second.grad, third.grad = numbers(6.0, 8.0), numbers(3.0, 4.0), numbers(30.0, 40.0)
    with ON.waiting_is_an_error():
        optimizer.step()
    assert float(clipping.norm) == pytest.approx(math.sqrt(100 + 25 + 2500), rel=1e-6)
    weights = np.concatenate(on_host([first, second, third]))
    np.testing.assert_allclose(weights, [-1.2, -1.6, -0.6, -0.8, -30.0, -40.0], rtol=1e-5)


def test_a_monitor_of_a_fused_step():
    weight = torch.nn.Parameter(torch.zeros(2, device=DEVICE))
    optimizer, monitor = torch.optim.SGD([weight], lr=1.0, fused=True), gradclip.Monitor()
    clip_at_step(optimizer, 1.0, monitor=monitor)
    for scale in (1.0, 0.1):
        weight.grad = numbers(3.0, 4.0) * scale
        with ON.waiting_is_an_error():
            optimizer.step()
    assert [one.norm for one in monitor.records] == pytest.approx([5.0, 0.5], rel=1e-6)
    assert (monitor.steps, monitor.num_clipped) == (2, 1)


def test_gradients_that_lie_otherwise_than_their_parameters():
    """An expanded gradient: fused kernels go through the memory of both side by side."""
    weight = torch.nn.Parameter(torch.zeros(3, 12, device=DEVICE))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    clip_at_step(optimizer, 3.0)
    weight.grad = torch.ones((), device=DEVICE).expand(3, 12)
    optimizer.step()
    np.testing.assert_allclose(on_host([weight])[0], np.full((3, 12), -0.5), rtol=1e-6)


@pytest.mark.parametrize("own", [False, True], ids=["shares", "own thresholds"])
def test_optimizers_in_the_backward_pass(own):
    """Each parameter steps in a hook, on the stream of the backward pass."""
    model, inputs = network(), batches(5)
    names = [name for name, _ in model.named_parameters()]
    given = {name: 0.1 * (i + 1) for i, name in enumerate(names)} if own else MAX_NORM
    clipping = clip_in_backward(model, given)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.05, momentum=0.9)

        def step(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for x in inputs:
        loss_of(model, x).backward()
    reference = network("cpu", torch.float64)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for x in inputs:
        optimizer.zero_grad()
        loss_of(reference, x.cpu().double()).backward()
        told = {}
        for name, parameter in reference.named_parameters():
            told[name] = float(torch.nn.utils.clip_grad_norm_([parameter], clipping.thresholds[name]))
        optimizer.step()
    assert {name: float(norm) for name, norm in clipping.norms.items()} == pytest.approx(told, rel=1e-4)
    assert any(norm > clipping.thresholds[name] for name, norm in told.items())
    check_weights(model, on_host(reference.parameters()))


def test_the_backward_pass_does_not_wait():
    model = network()
    clipping = clip_in_backward(model, MAX_NORM)
    (x,) = batches(1)
    loss = loss_of(model, x)
    loss.backward()
    model.zero_grad()
    loss = loss_of(model, 10 * x)
    with ON.waiting_is_an_error():
        loss.backward()
    for name, parameter in model.named_parameters():
        assert at_most(on_host([parameter.grad]), 2, clipping.thresholds[name])
