"""On a real GPU: the bound in exact arithmetic, bits that stay, policies, and no waiting. `make gpu` runs these."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip
from on_gpu import DTYPES, ON, drawn, grads, held, numbers, on_host, same_bits
from rational import at_most, power_of_norm

pytestmark = pytest.mark.gpu
SHAPES = [(300, 40), (70_000,), (), (0, 3), (17, 5)]
SMALL = [(30, 40), (1000,), (), (0, 3), (17, 5)]


@pytest.mark.parametrize("dtypes", [*((dtype,) for dtype in DTYPES), DTYPES], ids=str)
@pytest.mark.parametrize(
    ("ord", "share", "shapes"),
    [
        (2, 0.5, SHAPES),
        (2, 2.0, SHAPES),
        *((ord, share, SMALL) for ord in (1, 2, 3, math.inf) for share in (1e-3, 0.5, 0.999, 2.0)),
    ],
)
def test_the_bound_and_the_norm(dtypes, ord, share, shapes):
    leaves, moved = drawn(0, dtypes, shapes)
    wanted = float(gradclip.global_norm([x.double() for x in leaves], ord))
    max_norm = wanted * share
    with ON.waiting_is_an_error():
        held_grads = held(moved)
        norm = gradclip.clip_grad_norm_(held_grads, max_norm, ord)
        new, same = gradclip.clip_by_global_norm(moved, max_norm, ord=ord)
    results = on_host(grads(held_grads))
    assert float(norm) == pytest.approx(wanted, rel=1e-6)
    assert float(same) == pytest.approx(wanted, rel=1e-6)
    assert at_most(results, ord, max_norm)
    assert at_most(on_host(new), ord, max_norm)
    if share > 1:
        assert same_bits(new, leaves)
        assert same_bits(grads(held_grads), leaves)
    elif ord == 2:
        assert power_of_norm(results, 2) >= (max_norm * 0.98) ** 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("policy", ["propagate", "drop", "zero"])
def test_policies(dtype, policy):
    _, moved = drawn(1, (dtype,), SMALL)
    moved[1][5] = math.nan
    with ON.waiting_is_an_error():
        holders = held(moved)
        gradclip.clip_grad_norm_(holders, 1.0, nonfinite=policy)
    results = on_host(grads(holders))
    if policy == "zero":
        assert at_most(results, 2, 1.0)
        assert power_of_norm(results, 2) >= 0.98**2
    else:
        assert all((np.isnan(x) if policy == "propagate" else x == 0).all() for x in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_and_values(dtype):
    leaves, moved = drawn(2, (dtype,), SMALL)
    with ON.waiting_is_an_error():
        clipped, norms = gradclip.clip_by_layer_norm(moved, 0.5)
        clamped = gradclip.clip_by_value(moved, 0.1)
    assert all(at_most([x], 2, 0.5) for x in on_host(clipped))
    assert all(np.abs(x).max(initial=0.0) <= 0.1 for x in on_host(clamped))
    wanted = [float(gradclip.global_norm(x)) for x in leaves]
    assert [float(norm) for norm in norms] == pytest.approx(wanted, rel=1e-6)


def test_examples():
    _, moved = drawn(3, (torch.float32,), SMALL)
    batch = [moved[0].reshape(30, -1)]
    with ON.waiting_is_an_error():
        total, _ = gradclip.per_example_clip(batch, 0.5)
    wanted, _ = gradclip.per_example_clip(on_host(batch), 0.5)
    np.testing.assert_allclose(on_host(total)[0], wanted[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layers_every", [0, 1])
def test_a_monitor_waits_when_it_is_read(layers_every):
    monitor = gradclip.Monitor(layers_every=layers_every)
    parameters = [SimpleNamespace(grad=numbers(3.0, 4.0)), SimpleNamespace(grad=numbers(12.0))]
    with ON.waiting_is_an_error():
        for _ in range(3):
            gradclip.clip_grad_norm_(parameters, 1.0, monitor=monitor)
    assert (monitor.steps, monitor.records[0].norm) == (3, 13.0)
