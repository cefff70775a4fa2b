"""CUDA graphs: calls that are captured once and replayed on new gradients in the same memory."""

import math

import numpy as np
import pytest
import torch

import gradclip
from on_gpu import (
    DEVICE,
    DTYPES,
    ON,
    batches,
    check_weights,
    drawn,
    grads,
    held,
    loss_of,
    moved,
    network,
    on_host,
    same_bits,
    trained_on_host,
)
from rational import at_most, power_of_norm

pytestmark = pytest.mark.gpu
SHAPES = [(70, 40), (1001,), ()]
LARGE = [*SHAPES, (70_000,)]
STEPS = 4


def fill(holders, values):
    for one, x in zip(holders, values, strict=True):
        one.grad.copy_(x)


def captured(function, holders):
    """Return what replays a call on these gradients, and where its results are."""
    out = {}

    def step():
        out["result"] = function(holders)

    return ON.captured(step), out


def norm_of(leaves, ord=2):
    return float(gradclip.global_norm([x.double() for x in leaves], ord))


@pytest.mark.parametrize("dtypes", [*((dtype,) for dtype in DTYPES), DTYPES], ids=str)
@pytest.mark.parametrize("ord", [1, 2, math.inf])
def test_one_norm(dtypes, ord):
    shapes = LARGE if ord == 2 else SHAPES
    leaves, there = drawn(60, dtypes, shapes)
    holders, max_norm = held(there), norm_of(leaves, ord)
    replay, out = captured(lambda given: gradclip.clip_grad_norm_(given, max_norm, ord), holders)
    for seed, scale in ((61, 3.0), (62, 0.5), (63, 100.0)):
        leaves, there = drawn(seed, dtypes, shapes, scale)
        fill(holders, there)
        replay()
        assert float(out["result"]) == pytest.approx(norm_of(leaves, ord), rel=1e-6)
        if scale < 1:
            assert same_bits(grads(holders), leaves)
        else:
            assert at_most(on_host(grads(holders)), ord, max_norm)
            assert ord == 1 or norm_of(grads(holders), ord) >= 0.98 * max_norm


@pytest.mark.parametrize("policy", ["propagate", "drop", "zero"])
def test_policies(policy):
    leaves, there = drawn(64, (torch.float32,), SHAPES)
    holders = held(there)
    replay, _ = captured(lambda given: gradclip.clip_grad_norm_(given, 1.0, nonfinite=policy), holders)
    fill(holders, there)
    replay()
    assert power_of_norm(on_host(grads(holders)), 2) >= (1 - 1e-5) ** 2
    there[1][7] = math.nan
    fill(holders, there)
    replay()
    results = on_host(grads(holders))
    if policy == "zero":
        assert at_most(results, 2, 1.0)
        assert results[1][7] == 0
    else:
        assert all((np.isnan(x) if policy == "propagate" else x == 0).all() for x in results)
    fill(holders, leaves)
    replay()  # what the call before has found must not stay
    assert at_most(on_host(grads(holders)), 2, 1.0)


def test_layers_and_groups():
    _, there = drawn(65, (torch.float32, torch.bfloat16), LARGE)
    layers, named = held(there), dict(zip("abcd", held(there), strict=True))
    each, norms = captured(lambda given: gradclip.clip_grad_layer_norm_(given, 0.5), layers)
    parts, whole = captured(
        lambda given: gradclip.clip_grad_norm_(given.items(), {"a": 0.5, "b": None, "*": 1.0}), named
    )
    leaves, there = drawn(66, (torch.float32, torch.bfloat16), LARGE, 2.0)
    fill(layers, there)
    fill(named.values(), there)
    each()
    parts()
    results = on_host(grads(layers))
    assert all(at_most([x], 2, 0.5) for x in results)
    assert [float(norm) for norm in norms["result"]] == pytest.approx([norm_of([x]) for x in leaves], rel=1e-6)
    assert float(whole["result"]) == pytest.approx(norm_of(leaves), rel=1e-6)
    results = on_host(grads(named.values()))
    assert at_most(results[:1], 2, 0.5)
    assert at_most(results[2:], 2, 1.0)
    assert same_bits([named["b"].grad], leaves[1:2])


def test_a_functional_call():
    _, there = drawn(67, (torch.float32,), SHAPES)
    holders = held(there)
    replay, out = captured(lambda given: gradclip.clip_by_global_norm(grads(given), 0.5), holders)
    leaves, there = drawn(68, (torch.float32,), SHAPES)
    fill(holders, there)
    replay()
    clipped, norm = out["result"]
    assert float(norm) == pytest.approx(norm_of(leaves), rel=1e-6)
    assert at_most(on_host(clipped), 2, 0.5)
    assert power_of_norm(on_host(clipped), 2) >= 0.499**2
    assert same_bits(grads(holders), leaves)


def test_a_threshold_that_changes_between_replays():
    _, there = drawn(69, (torch.float32,), SHAPES)
    holders, max_norm = held(there), torch.ones((), device=DEVICE)
    replay, _ = captured(lambda given: gradclip.clip_grad_norm_(given, max_norm), holders)
    for threshold in (0.25, 4.0):
        max_norm.fill_(threshold)
        fill(holders, there)
        replay()
        assert at_most(on_host(grads(holders)), 2, threshold)
        assert norm_of(grads(holders)) == pytest.approx(threshold, rel=2e-5)


def test_eager_calls_between_replays():
    """They use addresses of their own, and those of the graph stay."""
    one, other = drawn(70, (torch.float32,), SHAPES), drawn(71, (torch.float32,), SHAPES, 2.0)
    holders = held(one[1])
    replay, out = captured(lambda given: gradclip.clip_grad_norm_(given, 0.5), holders)
    for _ in range(3):
        for leaves, there in (one, other):
            eager = held(there)
            fill(holders, there)
            norm = gradclip.clip_grad_norm_(eager, 0.25)
            ON.delay()
            replay()
            assert float(out["result"]) == pytest.approx(norm_of(leaves), rel=1e-6)
            assert float(norm) == pytest.approx(norm_of(leaves), rel=1e-6)
            assert at_most(on_host(grads(holders)), 2, 0.5)
            assert norm_of(grads(eager)) == pytest.approx(0.25, rel=2e-5)


def test_two_graphs():
    holders = [held(drawn(72 + i, (torch.float32,), SHAPES)[1]) for i in range(2)]
    made = [captured(lambda given, i=i: gradclip.clip_grad_norm_(given, 0.5 + i), holders[i]) for i in range(2)]
    for seed in (74, 75):
        leaves, there = drawn(seed, (torch.float32,), SHAPES)
        for i in (0, 1):
            fill(holders[i], there)
        for i in (1, 0):
            made[i][0]()
        for i in (0, 1):
            assert float(made[i][1]["result"]) == pytest.approx(norm_of(leaves), rel=1e-6)
            assert at_most(on_host(grads(holders[i])), 2, 0.5 + i)
            assert norm_of(grads(holders[i])) == pytest.approx(0.5 + i, rel=2e-5)


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_a_whole_step(kind):
    """Forward, backward, clipping and update in one graph, beside steps on the CPU in float64."""

    def optimizer_of(parameters, **settings):
        if kind == "SGD":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        return torch.optim.Adam(parameters, lr=0.05, eps=1e-2, **settings)

    model = network()
    optimizer = optimizer_of(model.parameters(), **({"capturable": True} if ON.capturable else {}))
    inputs, static, out = batches(STEPS), moved(batches(1, "cpu"))[0], {}

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, static).backward()
        out["norm"] = gradclip.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()

    replay, norms = ON.captured(step, warmups=3), []
    for x in inputs:
        static.copy_(x)
        replay()
        norms.append(float(out["norm"]))
    wanted, told = trained_on_host(optimizer_of, 0.7, [inputs[0]] * 3 + inputs)
    assert norms == pytest.approx(told[3:], rel=1e-3)
    assert max(told) > 0.7
    check_weights(model, wanted, 1e-3)
