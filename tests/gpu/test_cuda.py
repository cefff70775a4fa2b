"""On a real GPU: the bound in exact arithmetic, bits that stay, policies, and no waiting. `make gpu` runs these."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip
from rational import at_most, power_of_norm

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = [(300, 40), (70_000,), (), (0, 3), (17, 5)]


@pytest.fixture(autouse=True)
def waiting_is_an_error():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def drawn(seed, dtypes, scale=1.0):
    rng = np.random.default_rng(seed)
    made = [torch.tensor(np.float64(rng.standard_normal(shape)) * scale) for shape in SHAPES]
    leaves = [x.to(dtypes[i % len(dtypes)]) for i, x in enumerate(made)]
    torch.cuda.set_sync_debug_mode("default")
    moved = [x.to("cuda") for x in leaves]
    torch.cuda.set_sync_debug_mode("error")
    return leaves, moved


def on_host(leaves):
    torch.cuda.set_sync_debug_mode("default")
    return [x.detach().cpu().double().numpy() for x in leaves]


@pytest.mark.parametrize("dtypes", [*((dtype,) for dtype in DTYPES), DTYPES], ids=str)
@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
@pytest.mark.parametrize("share", [1e-3, 0.5, 0.999, 2.0])
def test_the_bound_and_the_norm(dtypes, ord, share):
    leaves, moved = drawn(0, dtypes)
    wanted = float(gradclip.global_norm([x.double() for x in leaves], ord))
    max_norm = wanted * share
    held = [SimpleNamespace(grad=x.clone()) for x in moved]
    norm = gradclip.clip_grad_norm_(held, max_norm, ord)
    new, same = gradclip.clip_by_global_norm(moved, max_norm, ord=ord)
    results = on_host([one.grad for one in held])
    assert float(norm) == pytest.approx(wanted, rel=1e-6)
    assert norm == same
    assert at_most(results, ord, max_norm)
    assert at_most(on_host(new), ord, max_norm)
    if share > 1:
        assert all(x.equal(y.cpu()) for x, y in zip(leaves, new, strict=True))
    elif ord == 2:
        assert power_of_norm(results, 2) >= (max_norm * 0.98) ** 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("policy", ["propagate", "skip", "zero"])
def test_policies(dtype, policy):
    _, moved = drawn(1, (dtype,))
    moved[1][5] = math.nan
    held = [SimpleNamespace(grad=x.clone()) for x in moved]
    gradclip.clip_grad_norm_(held, 1.0, nonfinite=policy)
    results = on_host([one.grad for one in held])
    if policy == "zero":
        assert at_most(results, 2, 1.0)
    else:
        assert all((np.isnan(x) if policy == "propagate" else x == 0).all() for x in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_and_values(dtype):
    leaves, moved = drawn(2, (dtype,))
    clipped, norms = gradclip.clip_by_layer_norm(moved, 0.5)
    clamped = gradclip.clip_by_value(moved, 0.1)
    assert all(at_most([x], 2, 0.5) for x in on_host(clipped))
    assert all(np.abs(x).max(initial=0.0) <= 0.1 for x in on_host(clamped))
    wanted = [float(gradclip.global_norm(x)) for x in leaves]
    assert [float(norm) for norm in norms] == pytest.approx(wanted, rel=1e-6)


def test_examples():
    _, moved = drawn(3, (torch.float32,))
    batch = [moved[0].reshape(30, -1)]
    total, _ = gradclip.per_example_clip(batch, 0.5)
    wanted, _ = gradclip.per_example_clip(on_host(batch), 0.5)
    np.testing.assert_allclose(on_host(total)[0], wanted[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layers_every", [0, 1])
def test_a_monitor_waits_when_it_is_read(layers_every):
    monitor, parameters = gradclip.Monitor(layers_every=layers_every), []
    for grad in ([3.0, 4.0], [12.0]):
        torch.cuda.set_sync_debug_mode("default")
        parameters.append(SimpleNamespace(grad=torch.tensor(grad, device="cuda")))
        torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        gradclip.clip_grad_norm_(parameters, 1.0, monitor=monitor)
    torch.cuda.set_sync_debug_mode("default")
    assert (monitor.steps, monitor.records[0].norm) == (3, 13.0)
