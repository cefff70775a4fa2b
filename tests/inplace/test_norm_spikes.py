"""Clipping in place with a monitor names the layers of spikes, whatever the policy, the framework and the threshold."""

import math
import pickle
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradclip
from frameworks import ALL, WITH_FLOAT32, by_name

EAGER = [framework for framework in WITH_FLOAT32 if not framework.jit]


def run(policy, bad, framework=ALL[0], max_norm=1.0, **settings):
    """Clip twelve times; the eleventh gradient of the head is bad."""
    monitor = gradclip.Monitor(**settings)
    for step in range(1, 13):
        head = [3.0, bad if step == 11 else 4.0]
        arrays = {name: framework.array(values) for name, values in (("body", [0.5, 0.0]), ("head", head))}
        parameters = {name: SimpleNamespace(grad=array) for name, array in arrays.items()}
        monitor.note(loss=step / 2, context=f"batch {step}")
        try:
            gradclip.clip_grad_norm_(parameters, max_norm, nonfinite=policy, monitor=monitor)
        except FloatingPointError:
            assert policy == "raise"
    return monitor


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
@pytest.mark.parametrize("bad", [400.0, math.nan, math.inf])
@pytest.mark.parametrize("policy", ["propagate", "drop", "zero"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_the_layer_of_a_spike_is_named(framework, bad, policy, adaptive):
    with framework.mode():
        monitor = run(policy, bad, framework, gradclip.AdaptiveThreshold(skip_above=4.0) if adaptive else 1.0)
        (spike,) = monitor.spikes
    assert (spike.step, spike.loss, spike.context, spike.raised) == (11, 5.5, "batch 11", False)
    assert spike.skipped == (adaptive if math.isfinite(bad) else policy == "drop")
    first, other = spike.layers
    assert (first.name, first.since, other.name, other.norm) == ("head", 11, "body", 0.5)
    if math.isfinite(bad):
        assert (first.share, first.times) == pytest.approx((1.0, 80.0), rel=1e-3)
    else:
        assert not spike.finite
        assert not first.finite
    assert monitor.layers is None


@pytest.mark.parametrize("framework", [f for f in EAGER if not f.traced], ids=by_name)
def test_a_call_that_raises_leaves_a_record_but_is_no_step(framework):
    monitor = run("raise", math.nan, framework)
    (spike,) = monitor.spikes
    assert (spike.raised, spike.step, spike.context, spike.loss) == (True, 11, "batch 11", 5.5)
    assert [layer.name for layer in spike.layers if not layer.finite] == ["head"]
    assert (monitor.steps, monitor.num_nonfinite, monitor.last.step, monitor.last.loss) == (11, 0, 11, 6.0)


@pytest.mark.after_error
def test_another_error_leaves_no_record_and_the_note():
    monitor = gradclip.Monitor()
    monitor.note(loss=0.5)
    with pytest.raises(ValueError, match="max_norm must not be negative"):
        gradclip.clip_grad_norm_({"w": np.ones(1)}, -1.0, monitor=monitor)
    assert (monitor.steps, monitor.spikes) == (0, [])
    gradclip.clip_grad_norm_({"w": np.ones(1)}, 1.0, monitor=monitor)
    assert monitor.last.loss == 0.5


def test_no_layers_are_measured_if_no_spikes_are_kept():
    monitor = run("drop", math.nan, keep_spikes=0)
    assert (monitor.spikes, monitor.num_nonfinite, monitor._watching()) == ([], 1, None)


def test_a_monitor_that_keeps_one_step_finds_the_same_spike():
    small, usual = run("drop", math.inf, capacity=1, fetch_every=1), run("drop", math.inf)
    assert repr(small.spikes) == repr(usual.spikes)
    assert len(small.records) == 1


def test_layers_every_decides_what_is_kept_with_steps():
    monitor = run("drop", math.inf, layers_every=5)
    assert monitor.layers.steps.tolist() == [1, 6, 11]
    assert monitor.spikes[0].layers[0].name == "head"


def test_copies_and_states_have_the_spikes():
    monitor = run("zero", math.nan)
    copied, loaded = pickle.loads(pickle.dumps(monitor)), gradclip.Monitor()
    loaded.load_state_dict(monitor.state_dict())
    assert repr(copied.spikes) == repr(loaded.spikes) == repr(monitor.spikes)


class Norms(TorchDispatchMode):
    """Count the operations that measure many tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "_foreach_norm" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", ["propagate", "drop"])
def test_a_device_measures_the_gradients_once_also_for_their_layers(policy):
    (framework,) = (one for one in ALL if one.name == "torch-device")
    counts = {}
    for keep in (0, 5):
        with framework.mode(), Norms() as norms:
            run(policy, 400.0, framework, keep_spikes=keep)
        counts[keep] = norms.count
    assert counts == {0: 12, 5: 12}


def test_under_zero_a_device_measures_what_is_left():
    (framework,) = (one for one in ALL if one.name == "torch-device")
    parameters = [SimpleNamespace(grad=framework.array([3.0, math.nan, 4.0]))]
    monitor = gradclip.Monitor()
    with framework.mode():
        norm = gradclip.clip_grad_norm_(parameters, 1.0, nonfinite="zero", monitor=monitor)
    assert float(norm) == 5.0
    assert math.isnan(monitor.spikes[0].layers[0].norm)


def test_a_layer_that_was_frozen_and_is_not_is_named():
    monitor = gradclip.Monitor(layers_every=1)
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    for owner in (first, second):
        first.grad = second.grad = None
        owner.grad = torch.ones(1)
        gradclip.clip_grad_norm_([first, second], 1.0, monitor=monitor)
    assert [step.layers.names for step in monitor.records] == [("parameters.0",), ("parameters.1",)]


def test_threads_note_for_themselves():
    monitor = gradclip.Monitor(fetch_every=3)

    def work(number):
        for _ in range(200):
            monitor.note(loss=float(number))
            gradclip.clip_grad_norm_({"w": np.full(1, float(number))}, 100.0, monitor=monitor)

    threads = [Thread(target=work, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    columns = monitor.columns
    assert len(columns.losses) == 600
    np.testing.assert_array_equal(columns.losses, columns.norms)


@pytest.mark.after_error
@pytest.mark.parametrize("key", ["process_group", "mesh"])
def test_a_group_that_names_what_is_no_process_group_is_refused_as_without_a_monitor(key):
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), 3.0)
    for monitor in (None, gradclip.Monitor()):
        with pytest.raises(ValueError, match="Default process group has not been initialized"):
            gradclip.clip_grad_norm_([{"params": [parameter], key: 3}], 1.0, monitor=monitor)
    assert parameter.grad.tolist() == [3.0, 3.0]


def test_too_few_names_in_a_group_are_not_used():
    first, second, third = (SimpleNamespace(grad=np.full(2, number)) for number in (1.0, 2.0, 3.0))
    groups = [{"params": [first, second], "param_names": ["a"]}, {"params": [third], "param_names": ["c"]}]
    monitor = gradclip.Monitor(layers_every=1)
    gradclip.clip_grad_norm_(groups, 1.0, monitor=monitor)
    assert monitor.last.layers.names == ("parameters.0.params.0", "parameters.0.params.1", "c")
