"""What a monitor records of calls by layer and by unit."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip
from frameworks import ALL, by_name

EAGER = [framework for framework in ALL if not framework.jit]


def by_units(parameters, max_norm, **options):
    return gradclip.clip_grad_unit_norm_(parameters, max_norm, unit_axis=0, **options)


CALLS = pytest.mark.parametrize("call", [gradclip.clip_grad_layer_norm_, by_units], ids=["layers", "units"])


def held(framework, *values):
    return {name: SimpleNamespace(grad=framework.array(value)) for name, value in zip("abc", values, strict=False)}


@CALLS
@pytest.mark.parametrize("framework", EAGER, ids=by_name)
def test_the_largest_multiple_of_a_threshold_is_recorded(framework, call):
    monitor = gradclip.Monitor(layers_every=1)
    with framework.mode():
        values = [[3.0, 4.0]], [[6.0, 8.0]], [[0.0, 2.0]]
        plain = held(framework, *values)
        call(plain, 20.0, monitor=monitor)
        assert framework.to_numpy(plain["b"].grad).tolist() == [[6.0, 8.0]]
        given = held(framework, *values)
        call(given, {"a": 1.0, "*": 8.0}, monitor=monitor)
        assert framework.to_numpy(given["a"].grad).astype(float).round(5).tolist() == [[0.6, 0.8]]
        call(held(framework, *values), {"c": 0.0, "*": math.inf}, monitor=monitor)
        call(held(framework, [[0.0, 0.0]], [[6.0, 8.0]]), {"a": 0.0, "*": 20.0}, monitor=monitor)
        call(held(framework, [[math.nan, 0.0]], [[6.0, 8.0]]), {"a": 1e9, "b": 1.0}, monitor=monitor)
    steps = [(step.norm, step.max_norm) for step in monitor.records]
    assert steps[:4] == [(10.0, 20.0), (5.0, 1.0), (2.0, 0.0), (10.0, 20.0)]
    assert math.isnan(steps[4][0])
    assert [step.clipped for step in monitor.records[:4]] == [False, True, True, False]
    assert monitor.records[1].layers.names == ("a", "b", "c")
    assert monitor.records[1].layers.norms.tolist() == [5.0, 10.0, 2.0]


def test_units_of_a_layer_are_one_layer_of_the_record():
    monitor = gradclip.Monitor(layers_every=1)
    gradclip.clip_grad_unit_norm_({"w": np.array([[3.0], [4.0]])}, 3.5, unit_axis=0, monitor=monitor)
    gradclip.clip_grad_unit_norm_({"w": np.ones((0, 3))}, 3.5, unit_axis=0, monitor=monitor)
    assert [(step.norm, step.max_norm) for step in monitor.records] == [(4.0, 3.5), (0.0, 3.5)]
    assert monitor.records[0].layers.norms.tolist() == [5.0]


@CALLS
@pytest.mark.parametrize("framework", EAGER, ids=by_name)
def test_a_layer_without_elements_counts_as_zero(framework, call):
    monitor = gradclip.Monitor(layers_every=1)
    with framework.mode():
        call(held(framework, np.ones((0, 3)), [[3.0, 4.0]]), 2.0, monitor=monitor)
    assert [(step.norm, step.max_norm) for step in monitor.records] == [(5.0, 2.0)]
    assert monitor.records[0].layers.norms.tolist() == [0.0, 5.0]


def test_groups_of_a_prefix_are_named_by_their_first_array():
    monitor = gradclip.Monitor(layers_every=1)
    tree = {"a": [np.array([3.0]), np.array([4.0])], "b": np.array([2.0])}
    gradclip.clip_grad_layer_norm_(tree, {"a": 1.0, "b": 9.0}, monitor=monitor)
    assert monitor.last.layers.names == ("a.0 and 1 more", "b")
    assert monitor.last.norm == 5.0


def test_nothing_to_clip_is_not_recorded():
    monitor = gradclip.Monitor()
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        gradclip.clip_grad_layer_norm_([SimpleNamespace(grad=None)], 1.0, monitor=monitor)
    assert monitor.last is None


@CALLS
@pytest.mark.after_error
def test_after_an_error_nothing_has_changed(call):
    monitor, weight = gradclip.Monitor(), torch.nn.Parameter(torch.zeros(1, 2))
    for value in (1.0, 1.0, 1.0):
        weight.grad = torch.tensor([[value, 0.0]])
        call([("weight", weight)], 2.0, monitor=monitor)
    weight.grad = torch.tensor([[math.nan, 3.0]])
    with pytest.raises(FloatingPointError, match="weight"):
        call([("weight", weight)], 1.0, nonfinite="raise", monitor=monitor)
    with pytest.raises(TypeError, match="monitor must be a"):
        call([("weight", weight)], 1.0, monitor=gradclip.Monitor)
    assert weight.grad[0, 1] == 3.0
    assert len(monitor.records) == 3
    (spike,) = monitor.spikes
    assert spike.raised
    assert spike.layers[0].name == "weight"


def adaptively(weights, gradients, monitor, clipping=0.1, **options):
    """Clip rows to a tenth of the norms of their weights; return what is left."""
    holders = {name: SimpleNamespace(grad=grad) for name, grad in gradients.items()}
    gradclip.adaptive_grad_clip_(
        holders, clipping, params=list(weights.values()), unit_axis=0, monitor=monitor, **options
    )
    return [holder.grad for holder in holders.values()]


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
def test_the_unit_that_is_the_largest_multiple_of_its_weights_is_recorded(framework):
    monitor = gradclip.Monitor(layers_every=1)
    gradients = {"a": [[30.0, 40.0], [0.6, 0.8]], "b": [[6.0, 8.0]]}
    weights = {"a": [[300.0, 400.0], [3.0, 4.0]], "b": [[60.0, 80.0]]}
    with framework.mode():
        gradients, weights = ({k: framework.array(v) for k, v in of.items()} for of in (gradients, weights))
        left = adaptively(weights, gradients, monitor)
        adaptively(weights, {"a": gradients["a"], "b": gradients["b"]}, monitor, 1e3)
        assert framework.to_numpy(left[0])[1].astype(float).round(4).tolist() == [0.3, 0.4]
    first, second = monitor.records
    assert (first.norm, first.max_norm, first.clipped) == (1.0, pytest.approx(0.5, rel=1e-5), True)
    assert not second.clipped
    assert first.layers.names == ("a", "b")
    assert first.layers.norms.tolist() == pytest.approx([50.01, 10.0], rel=1e-5)


def test_weights_that_are_small_count_as_eps():
    monitor = gradclip.Monitor()
    given = np.array([[3.0, 4.0], [0.0, 0.0]]), np.zeros((0, 2))
    weights = [np.zeros((2, 2)), np.zeros((0, 2))]
    gradclip.adaptive_grad_clip_(list(given), 0.5, 2.0, params=weights, unit_axis=0, monitor=monitor)
    gradclip.adaptive_grad_clip_(list(given), 0.0, params=weights, unit_axis=0, monitor=monitor)
    assert [(step.norm, step.max_norm) for step in monitor.records] == [
        (5.0, pytest.approx(1.0)),
        (pytest.approx(1.0), 0.0),
    ]


@pytest.mark.after_error
def test_after_an_error_of_agc_nothing_has_changed():
    monitor, weight = gradclip.Monitor(), torch.nn.Parameter(torch.ones(1, 2))
    for value in (1.0, 1.0, 1.0):
        weight.grad = torch.tensor([[value, 0.0]])
        gradclip.adaptive_grad_clip_([("weight", weight)], monitor=monitor)
    weight.grad = torch.tensor([[math.nan, 3.0]])
    with pytest.raises(FloatingPointError, match="weight"):
        gradclip.adaptive_grad_clip_([("weight", weight)], nonfinite="raise", monitor=monitor)
    with pytest.raises(TypeError, match="monitor must be a"):
        gradclip.adaptive_grad_clip_([("weight", weight)], monitor=gradclip.Monitor)
    assert weight.grad[0, 1] == 3.0
    assert len(monitor.records) == 3
    (spike,) = monitor.spikes
    assert spike.layers[0].name == "weight"
