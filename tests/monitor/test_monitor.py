"""The monitor: what it is fed, counts, keeps and tells."""

import copy
import math
import pickle
import sys
from threading import Event, Thread

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradclip
from gradclip._src.monitor.records import Counts


def fed(norms, max_norm=1.0, **settings):
    monitor = gradclip.Monitor(**settings)
    for norm in norms:
        monitor.record(norm, max_norm)
    return monitor


def test_counts_and_records():
    monitor = fed([0.5, 2.0, math.nan])
    assert (monitor.steps, monitor.num_clipped, monitor.num_skipped, monitor.num_nonfinite) == (3, 1, 0, 1)
    assert [step.norm for step in monitor.records[:2]] == [0.5, 2.0]
    assert (monitor.last.step, monitor.last.finite) == (3, False)
    assert monitor.columns.clipped.tolist() == [False, True, False]
    assert repr(monitor) == "Monitor(3 steps, 1 clipped, 0 skipped, 1 not finite)"


def test_nothing_recorded():
    monitor = gradclip.Monitor()
    assert (monitor.steps, monitor.last, monitor.records, monitor.layers, monitor.top_layers) == (0, None, [], None, {})


def test_the_oldest_go_and_the_counts_stay():
    monitor = fed(range(1, 11), 5.0, capacity=3)
    assert [step.step for step in monitor.records] == [8, 9, 10]
    assert monitor.counts == Counts(10, 5, 0, 0)


@pytest.mark.after_error
def test_a_value_that_cannot_be_fetched_costs_no_other_step():
    monitor = fed([1.0])
    torch.func.vmap(lambda row: monitor.record(row.norm(), 1.0) or row)(torch.ones(3, 2))
    monitor.record(3.0, 1.0)
    with pytest.raises(RuntimeError, match="vmapped"):
        monitor.fetch()
    assert [(step.step, step.norm) for step in monitor.records] == [(1, 1.0), (2, 3.0)]


def test_threads_record_and_read_at_the_same_time():
    monitor, done, before = gradclip.Monitor(capacity=50, fetch_every=3), Event(), sys.getswitchinterval()
    reader = Thread(target=lambda: [monitor.columns for _ in iter(done.is_set, True)])
    writers = [Thread(target=lambda: [monitor.record(2.0, 1.0) for _ in range(2000)]) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in (reader, *writers):
            thread.start()
        for thread in writers:
            thread.join()
    finally:
        done.set()
        reader.join()
        sys.setswitchinterval(before)
    assert monitor.counts == Counts(4000, 4000, 0, 0)
    assert [step.step for step in monitor.records] == list(range(3951, 4001))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_goes_on_by_itself(again):
    monitor = fed([0.5, 2.0])
    copied = again(monitor)
    copied.record(3.0, 1.0)
    assert (monitor.counts, copied.counts) == (Counts(2, 1), Counts(3, 2))


class NoLook(TorchDispatchMode):
    """Copies to the host are counted, and a look at a single value is an error."""

    cats = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), "a look at a value waits for the device"
        self.cats += "cat" in str(func)
        return func(*args, **(kwargs or {}))


def test_recording_does_not_look_and_fetching_brings_all_at_once():
    monitor = gradclip.Monitor()
    with NoLook() as look:
        for norm in range(50):
            monitor.record(torch.tensor(float(norm)), torch.tensor(10.0))
        assert look.cats == 0
        assert monitor.steps == 50
        assert look.cats == 1
    assert monitor.num_clipped == 39


def test_values_that_jit_returns():
    @jax.jit
    def step(grads):
        clipped, norm = gradclip.clip_by_global_norm(grads, 1.0)
        return clipped, norm, gradclip.layer_norms(grads)

    monitor = gradclip.Monitor()
    _, norm, layers = step({"w": jnp.array([3.0, 4.0]), "b": jnp.array([12.0])})
    monitor.record(norm, 1.0, layer_norms=layers)
    assert monitor.last.norm == 13.0
    assert monitor.top_layers == {"b": 12.0, "w": 5.0}


def test_the_top_layers_are_those_with_the_largest_medians():
    monitor = gradclip.Monitor(top=2)
    for a, b, c in ((1.0, 9.0, 2.0), (1.0, 0.1, 2.0), (1.0, 0.1, 2.0)):
        monitor.record(10.0, 1.0, layer_norms={"a": a, "b": b, "c": c})
    assert monitor.top_layers == {"c": 2.0, "a": 1.0}
    assert monitor.layers.norms.shape == (3, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("capacity", 10**30),
        ("fetch_every", "3"),
        ("capacity", 0),
        ("fetch_every", 0),
        ("layers_every", -1),
        ("top", 1.5),
        ("capacity", True),
    ],
)
def test_settings_that_cannot_work(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least"):
        gradclip.Monitor(**{name: value})


def test_advice_is_on_what_is_kept():
    monitor = fed([100.0] * 40 + [1.0] * 40, capacity=40)
    assert monitor.advise() == fed([1.0] * 40).advise()
