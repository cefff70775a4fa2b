"""Clipping in place with a monitor: the same results, recorded."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradclip
from frameworks import ALL, WITH_FLOAT32, by_name
from gradclip._src.core.pipeline import EachNorm

EAGER = [framework for framework in WITH_FLOAT32 if not framework.jit]


def holders(framework, *grads):
    return [SimpleNamespace(grad=None if grad is None else framework.array(*grad)) for grad in grads]


def random_grads(rng):
    return [(rng.standard_normal(size).astype(np.float32),) for size in (3, 70_000, 200_000, 5)]


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
@pytest.mark.parametrize("layers_every", [0, 1])
@pytest.mark.parametrize("max_norm", [1.0, 1e6])
def test_a_monitor_changes_no_bit(framework, layers_every, max_norm):
    monitor = gradclip.Monitor(layers_every=layers_every)
    grads = random_grads(np.random.default_rng(1))
    seen, plain = holders(framework, *grads), holders(framework, *grads)
    with framework.mode():
        norm = gradclip.clip_grad_norm_(seen, max_norm, monitor=monitor)
        assert float(norm) == float(gradclip.clip_grad_norm_(plain, max_norm))
    for one, other in zip(seen, plain, strict=True):
        np.testing.assert_array_equal(framework.to_numpy(one.grad), framework.to_numpy(other.grad))
    assert monitor.last.norm == float(norm)
    assert monitor.num_clipped == (max_norm == 1.0)


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
@pytest.mark.parametrize("ord", [2, 1, 3, "inf"])
def test_the_norm_of_each_gradient_is_recorded_with_its_name(framework, ord):
    parameters = dict(
        zip(("w", "none", "b"), holders(framework, ([3.0, 4.0],), None, ([12.0], "float16")), strict=True)
    )
    monitor = gradclip.Monitor(layers_every=1)
    with framework.mode():
        gradclip.clip_grad_norm_(parameters, 1.0, ord, monitor=monitor)
    step = monitor.last
    assert step.layers.names == ("w", "b")
    expected = {2: 5.0, 1: 7.0, 3: 91 ** (1 / 3), "inf": 4.0}[ord]
    assert step.layers.norms.tolist() == pytest.approx([expected, 12.0], rel=1e-6)


def test_layers_are_recorded_every_so_many_steps():
    monitor = gradclip.Monitor(layers_every=3)
    for _ in range(7):
        gradclip.clip_grad_norm_({"w": np.ones(2), "b": [np.ones(1)]}, 1.0, monitor=monitor)
    assert monitor.layers.steps.tolist() == [1, 4, 7]
    assert monitor.layers.names == ("b.0", "w")


def test_generators_and_iterators_are_read_once():
    for through in (lambda p: (x for x in p), iter, lambda p: filter(None, p)):
        for layers_every in (0, 1):
            monitor = gradclip.Monitor(layers_every=layers_every)
            parameters = [SimpleNamespace(grad=np.array([3.0, 4.0]))]
            gradclip.clip_grad_norm_(through(parameters), 1.0, monitor=monitor)
            assert monitor.last.norm == 5.0
            assert np.linalg.norm(parameters[0].grad) <= 1.0


def test_each_parameter_is_one_layer():
    grad = np.array([3.0, 4.0])
    one, other = SimpleNamespace(grad=grad), SimpleNamespace(grad=grad)
    monitor = gradclip.Monitor(layers_every=1)
    gradclip.clip_grad_norm_([one, other, one], 1.0, monitor=monitor)
    layers = monitor.last.layers
    assert (layers.names, layers.norms.tolist()) == (("parameters.0", "parameters.1"), [5.0, 5.0])


def test_an_empty_gradient_that_is_listed_twice_is_one_layer():
    empty, other = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((0, 3), (2,)))
    empty.grad, other.grad = torch.zeros(0, 3), torch.tensor([3.0, 4.0])
    monitor = gradclip.Monitor(layers_every=1)
    gradclip.clip_grad_norm_([empty, other, empty], 1.0, monitor=monitor)
    layers = monitor.last.layers
    assert (layers.names, layers.norms.tolist()) == (("parameters.0", "parameters.1"), [0.0, 5.0])


def test_gradients_are_read_once_where_the_kernels_know_them(monkeypatch):
    def fail(*args):
        raise AssertionError("read again")

    monkeypatch.setattr(EachNorm, "measure", fail)
    monitor = gradclip.Monitor(layers_every=1)
    gradclip.clip_grad_norm_({"w": np.array([3.0, 4.0]), "b": np.array([12.0])}, 1.0, monitor=monitor)
    assert monitor.top_layers == {"b": 12.0, "w": 5.0}
    model = torch.nn.Linear(2, 1)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": iter([("bias", model.bias)])}]
    for given, name in ((model.named_parameters(), "weight"), (groups, "parameters.0.params.0")):
        model.weight.grad, model.bias.grad = torch.tensor([[3.0, 4.0]]), torch.tensor([12.0])
        gradclip.clip_grad_norm_(given, 1.0, monitor=monitor)
        assert dict(zip(*monitor.last.layers, strict=True)) == {name: 5.0, "bias": 12.0}


@pytest.mark.after_error
def test_a_call_that_raises_records_nothing():
    monitor = gradclip.Monitor(layers_every=1)
    with pytest.raises(FloatingPointError):
        gradclip.clip_grad_norm_({"w": np.array([np.nan])}, 1.0, nonfinite="raise", monitor=monitor)
    with pytest.raises(ValueError, match="max_norm must not be negative"):
        gradclip.clip_grad_norm_({"w": np.ones(1)}, -1.0, monitor=monitor)
    assert monitor.steps == 0


def test_a_call_that_raises_because_gradients_are_not_finite_is_a_spike_with_its_layers():
    monitor = gradclip.Monitor(layers_every=1)
    with pytest.raises(FloatingPointError):
        gradclip.clip_grad_norm_({"a": np.ones(1), "w": np.array([np.nan])}, 1.0, nonfinite="raise", monitor=monitor)
    (spike,) = monitor.spikes
    assert (spike.step, spike.raised, [layer.name for layer in spike.layers]) == (1, True, ["w", "a"])


def test_policies():
    monitor = gradclip.Monitor(layers_every=1)
    for policy in ("propagate", "drop", "zero"):
        gradclip.clip_grad_norm_({"w": np.array([np.nan, 3.0])}, 1.0, nonfinite=policy, monitor=monitor)
    assert [(step.finite, step.skipped, step.clipped) for step in monitor.records] == [
        (False, False, False),
        (False, True, False),
        (True, False, True),
    ]


def test_no_gradient_at_all():
    monitor = gradclip.Monitor(layers_every=1)
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        gradclip.clip_grad_norm_([SimpleNamespace(grad=None)], 1.0, monitor=monitor)
    assert (monitor.last.norm, monitor.last.layers) == (0.0, None)


@pytest.mark.parametrize("layers_every", [0, 1])
@pytest.mark.parametrize("framework", [f for f in ALL if f.name == "torch-device"], ids=by_name)
def test_no_step_waits_for_a_device(framework, layers_every):
    class NoLook(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert "_local_scalar_dense" not in str(func), "a look at a value waits for the device"
            assert "nonzero" not in str(func)
            return func(*args, **(kwargs or {}))

    monitor = gradclip.Monitor(layers_every=layers_every)
    parameters = holders(framework, ([3.0, 4.0],), ([12.0], "bfloat16"))
    with framework.mode(), NoLook():
        for _ in range(5):
            gradclip.clip_grad_norm_(parameters, 1.0, monitor=monitor)
            gradclip.clip_grad_norm_(parameters, torch.tensor(1.0), nonfinite="drop", monitor=monitor)
    assert (monitor.steps, monitor.records[0].norm) == (10, 13.0)


def test_layers_are_not_recorded_where_other_processes_are_named():
    monitor = gradclip.Monitor(layers_every=1)
    parameter = torch.nn.Parameter(torch.zeros(2))
    for groups in ({"process_group": []}, {}):
        parameter.grad = torch.tensor([3.0, 4.0])
        gradclip.clip_grad_norm_([parameter], 1.0, monitor=monitor, **groups)
    assert [(step.norm, step.layers is None) for step in monitor.records] == [(5.0, True), (5.0, False)]


@pytest.mark.after_error
@pytest.mark.parametrize("monitor", ["run", [gradclip.Monitor()], gradclip.Monitor])
@pytest.mark.parametrize("process_group", [None, []])
def test_what_is_no_monitor_is_refused_before_anything_is_clipped(monitor, process_group):
    gradient = np.array([3.0, 4.0])
    with pytest.raises(TypeError, match=r"monitor must be a gradclip\.Monitor, got "):
        gradclip.clip_grad_norm_({"w": gradient}, 1.0, monitor=monitor, process_group=process_group)
    assert gradient.tolist() == [3.0, 4.0]
