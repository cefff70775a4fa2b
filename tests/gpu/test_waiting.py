"""No call waits for the device before a value is read. PyTorch raises an error where one does."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip
from gradclip.integrations import torch as drop_in
from on_gpu import DEVICE, DTYPES, ON, drawn, grads, held, moved, network, on_host, parameters_with
from rational import at_most

pytestmark = pytest.mark.gpu
SHAPES = [(30, 40), (1000,), (), (0, 3), (17, 5)]
POLICIES = ("propagate", "drop", "zero")


def norm_of(leaves):
    return float(gradclip.global_norm([x.double() for x in leaves]))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
@pytest.mark.parametrize("dtypes", [*((dtype,) for dtype in DTYPES), DTYPES], ids=str)
def test_one_norm(dtypes, ord, policy):
    _, there = drawn(40, dtypes, SHAPES)
    with ON.waiting_is_an_error():
        holders = held(there)
        gradclip.clip_grad_norm_(holders, 0.5, ord, nonfinite=policy)
        gradclip.grad_norm(holders, ord)
        gradclip.clip_by_global_norm(there, 0.5, ord=ord, nonfinite=policy)
    assert at_most(on_host(grads(holders)), ord, 0.5)


@pytest.mark.parametrize("threshold", ["a number", "a tensor", "a tensor on the host", "a NumPy number"])
def test_thresholds(threshold):
    _, there = drawn(41, (torch.float32,), SHAPES)
    made = {
        "a number": 0.5,
        "a tensor": torch.tensor(0.5, device=DEVICE),
        "a tensor on the host": torch.tensor(0.5),
        "a NumPy number": np.float64(0.5),
    }
    holders = held(there)
    with ON.waiting_is_an_error():
        gradclip.clip_grad_norm_(holders, made[threshold])
    assert at_most(on_host(grads(holders)), 2, 0.5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtypes", [(torch.float32,), DTYPES], ids=str)
def test_several_norms(dtypes, policy):
    _, there = drawn(42, dtypes, SHAPES)
    params = parameters_with(there)
    names = dict(zip("abcde", params, strict=True))
    groups = [{"params": params[:2], "max_norm": 0.25}, {"params": params[2:]}]
    by_name, by_group = held(there), held(there)
    with ON.waiting_is_an_error():
        gradclip.clip_grad_layer_norm_(by_name, 0.5, nonfinite=policy)
        gradclip.clip_by_layer_norm(there, [0.5, 0.25, 1.0, 1.0, 2.0], nonfinite=policy)
        gradclip.clip_grad_norm_(groups, 0.5, nonfinite=policy)
        gradclip.clip_grad_norm_(names.items(), {"a": 0.125, "*": 0.25}, nonfinite=policy)
        gradclip.clip_grad_norm_(dict(zip("abcde", by_group, strict=True)).items(), {"a": 1.0, "b": None, "*": 0.5})
    assert all(at_most([x], 2, 0.5) for x in on_host(grads(by_name)))
    assert at_most(on_host([params[0].grad]), 2, 0.125)
    assert on_host([by_group[1].grad])[0].tolist() == on_host([there[1]])[0].tolist()


@pytest.mark.parametrize("dtypes", [(torch.float32,), DTYPES], ids=str)
def test_other_calls(dtypes):
    _, there = drawn(43, dtypes, SHAPES)
    holders, clamped, rows = held(there), held(there), held(there[:1])
    with ON.waiting_is_an_error():
        gradclip.layer_norms(there)
        norm = gradclip.global_norm(there)
        gradclip.clip_by_value(there, 0.1)
        gradclip.clip_grad_value_(clamped, 0.1)
        gradclip.clip_grad_unit_norm_(rows, 0.5)
        gradclip.clip_by_unit_norm(there[0], 0.5)
        gradclip.adaptive_grad_clip(there[0], torch.ones_like(there[0]))
        drop_in.clip_grads_with_norm_(holders, 0.5, norm)
        drop_in.get_total_norm(there)
    assert all(np.abs(x).max(initial=0.0) <= 0.1 for x in on_host(grads(clamped)))
    assert all(at_most([row], 2, 0.5) for row in on_host(grads(rows))[0])
    assert norm_of(grads(holders)) == pytest.approx(0.5, rel=2e-2)


@pytest.mark.parametrize("settings", [{}, {"per_layer": True}, {"rule": "automatic"}, {"nonfinite": "zero"}], ids=str)
def test_examples(settings):
    leaves, there = drawn(44, (torch.float32,), [(20, 30), (20, 4, 5)])
    mask = torch.tensor([i % 3 > 0 for i in range(20)])
    (mask_there,) = moved([mask])
    with ON.waiting_is_an_error():
        summed, _ = gradclip.per_example_clip(there, 0.5, mask=mask_there, **settings)
    wanted, _ = gradclip.per_example_clip([x.double() for x in leaves], 0.5, mask=mask, **settings)
    for found, other in zip(on_host(summed), on_host(wanted), strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-5, atol=1e-5)


def test_gradients_that_differ_in_place_from_call_to_call():
    """New addresses reach the device without waiting."""
    _, there = drawn(45, (torch.float32, torch.bfloat16), SHAPES)
    with ON.waiting_is_an_error():
        made = [held(there) for _ in range(20)]
        norms = [gradclip.clip_grad_norm_(holders, 0.5) for holders in made]
    assert len({float(norm) for norm in norms}) == 1
    assert all(at_most(on_host(grads(holders)), 2, 0.5) for holders in made[::5])


@pytest.mark.parametrize("kind", ["expanded", "shared", "strided"])
def test_odd_gradients(kind):
    flat = torch.full((64,), 2.0, device=DEVICE)
    made = {
        "expanded": lambda: [flat[:1].expand(64)],
        "shared": lambda: [flat, flat],
        "strided": lambda: [flat[::2]],
    }
    holders = [SimpleNamespace(grad=x) for x in made[kind]()]
    with ON.waiting_is_an_error():
        norm = gradclip.clip_grad_norm_(holders, 1.0)
    assert float(norm) == pytest.approx({"expanded": 16.0, "shared": math.sqrt(512), "strided": math.sqrt(128)}[kind])
    assert at_most(on_host(grads(holders)), 2, 1.0)


def test_a_step_that_clips():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    clipping = drop_in.clip_at_step(optimizer, 0.5)
    x = torch.ones(8, 12, device=DEVICE)
    for _ in range(2):
        model(x).sum().backward()
        with ON.waiting_is_an_error():
            optimizer.step()
            logged = clipping.numbers()
            optimizer.zero_grad()
    assert float(logged["grad_norm"]) > 0.5
    assert float(logged["grad_norm_clipped"]) == pytest.approx(0.5, rel=1e-5)


def test_raise_may_wait():
    _, there = drawn(46, (torch.float32,), SHAPES)
    holders = held(there)
    gradclip.clip_grad_norm_(holders, 0.5, nonfinite="raise")
    assert at_most(on_host(grads(holders)), 2, 0.5)
