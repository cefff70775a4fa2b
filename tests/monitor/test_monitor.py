"""The monitor: what it is fed, keeps, tells and saves."""

import copy
import math
import pickle
import sys
from threading import Event, Thread

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradclip
from gradclip.monitor.records import Counts


def fed(norms, max_norm=1.0, **settings):
    monitor = gradclip.Monitor(**settings)
    for norm in norms:
        monitor.record(norm, max_norm)
    return monitor


def test_counts_and_records():
    monitor = fed([0.5, 2.0, math.nan])
    assert (monitor.steps, monitor.clipped, monitor.skipped, monitor.nonfinite) == (3, 1, 0, 1)
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


def test_the_callback_gets_plain_floats_in_order_once_values_are_fetched():
    told = []
    monitor = gradclip.Monitor(fetch_every=2, top=1, callback=lambda step, numbers: told.append((step, numbers)))
    monitor.record(torch.tensor(5.0), 1.0, {"a": torch.tensor(3.0), "b": torch.tensor(4.0)})
    assert told == []
    monitor.record(jnp.float32(0.5), np.float32(1.0))
    assert [step for step, _ in told] == [1, 2]
    assert told[0][1]["norm"] == 5.0
    assert told[0][1]["layers/b"] == 4.0
    assert "layers/a" not in told[0][1]
    assert all(type(value) is float for _, numbers in told for value in numbers.values())


def test_a_callback_may_read():
    seen = []
    monitor = gradclip.Monitor(fetch_every=1, callback=lambda step, _: seen.append(monitor.steps))
    for _ in range(2):
        monitor.record(1.0, 1.0)
    assert seen == [1, 2]


def test_a_callback_that_raises_is_called_for_the_other_steps_too():
    told = []

    def callback(step, numbers):
        told.append(step)
        if step in (2, 3):
            raise OSError(f"step {step} could not be sent")

    monitor = gradclip.Monitor(fetch_every=4, callback=callback)
    for norm in range(3):
        monitor.record(norm, 1.0)
    with pytest.raises(OSError, match="step 2 could not be sent"):
        monitor.record(3, 1.0)
    assert (told, monitor.steps) == ([1, 2, 3, 4], 4)


def test_steps_are_told_in_order_whichever_thread_has_fetched_them():
    told, slow, recorded = [], Event(), Event()

    def callback(step, _):
        if step == 1:
            slow.set()
            recorded.wait(10)
        told.append(step)

    monitor = gradclip.Monitor(fetch_every=2, callback=callback)
    reader = Thread(target=lambda: monitor.records)
    monitor.record(1.0, 1.0)
    reader.start()
    slow.wait(10)
    for _ in range(5):
        monitor.record(1.0, 1.0)
    assert (monitor.steps, told) == (6, [])
    recorded.set()
    monitor.fetch()
    assert told == [1, 2, 3, 4, 5, 6]
    reader.join()


def test_a_callback_may_record_and_wait_for_a_thread_that_reads():
    told = []

    def callback(step, _):
        reader = Thread(target=lambda: monitor.counts)
        reader.start()
        reader.join(10)
        assert not reader.is_alive()
        if step < 3:
            monitor.record(step, 1.0)
        told.append(step)

    monitor = gradclip.Monitor(fetch_every=1, callback=callback)
    monitor.record(1.0, 1.0)
    monitor.fetch()
    assert told == [1, 2, 3]


def test_many_threads_tell_in_order():
    told = []
    monitor = gradclip.Monitor(fetch_every=2, callback=lambda step, _: told.append(step))
    threads = [Thread(target=lambda: [monitor.record(2.0, 1.0) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monitor.fetch()
    assert told == list(range(1, 2001))


def test_an_interrupted_callback_does_not_stop_later_ones():
    told = []

    def callback(step, _):
        told.append(step)
        if step == 1:
            raise KeyboardInterrupt

    monitor = gradclip.Monitor(fetch_every=1, callback=callback)
    with pytest.raises(KeyboardInterrupt):
        monitor.record(1.0, 1.0)
    monitor.record(1.0, 1.0)
    assert told == [1, 2]


def test_steps_in_vectors_count_each_towards_fetch_every():
    told = []
    monitor = gradclip.Monitor(fetch_every=10, callback=lambda step, _: told.append(step))
    monitor.record(np.ones(4), 1.0)
    monitor.record(jnp.ones(5), 1.0)
    assert told == []
    monitor.record(1.0, 1.0)
    assert len(told) == 10
    monitor.record(torch.ones(300), 1.0)
    assert len(told) == 310


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
    assert monitor.clipped == 39


def test_values_that_jit_returns():
    @jax.jit
    def step(grads):
        clipped, norm = gradclip.clip_by_global_norm(grads, 1.0)
        return clipped, norm, gradclip.layer_norms(grads)

    monitor = gradclip.Monitor()
    _, norm, layers = step({"w": jnp.array([3.0, 4.0]), "b": jnp.array([12.0])})
    monitor.record(norm, 1.0, layers)
    assert monitor.last.norm == 13.0
    assert monitor.top_layers == {"b": 12.0, "w": 5.0}


def test_the_top_layers_are_those_with_the_largest_medians():
    monitor = gradclip.Monitor(top=2)
    for a, b, c in ((1.0, 9.0, 2.0), (1.0, 0.1, 2.0), (1.0, 0.1, 2.0)):
        monitor.record(10.0, 1.0, {"a": a, "b": b, "c": c})
    assert monitor.top_layers == {"c": 2.0, "a": 1.0}
    assert monitor.layers.norms.shape == (3, 3)


def some():
    monitor = gradclip.Monitor(capacity=3)
    monitor.record(2.0, 1.0)
    monitor.record(np.array([0.5, math.nan, 3.0]), np.array([1.0, 1.0, math.inf]), nonfinite="skip")
    monitor.record(torch.tensor(7.0), 5.0, {"a": torch.tensor(1.5)})
    return monitor


def assert_same_records(left, right):
    assert repr(left.records) == repr(right.records)


def test_lines_are_saved_and_loaded(tmp_path):
    monitor, path = some(), tmp_path / "steps.jsonl"
    monitor.save(path)
    assert len(path.read_text().splitlines()) == 3
    loaded = gradclip.Monitor.load(path)
    assert_same_records(loaded, monitor)
    assert loaded.counts == Counts(3, 1, 1, 1)
    assert [step.step for step in gradclip.Monitor.load(path, capacity=1).records] == [5]
    loaded.record(1.0, 1.0)
    assert loaded.last.step == 6


def test_nothing_is_saved_and_loaded(tmp_path):
    gradclip.Monitor().save(tmp_path / "empty")
    loaded = gradclip.Monitor.load(tmp_path / "empty")
    assert loaded.steps == 0
    for norm in (1.0, 2.0):
        loaded.record(norm, 1.0)
    assert [step.norm for step in loaded.records] == [1.0, 2.0]
    with pytest.raises(ValueError, match="capacity must be"):
        gradclip.Monitor.load(tmp_path / "empty", capacity=0)


def test_a_state_goes_through_a_checkpoint(tmp_path):
    monitor = some()
    torch.save(monitor.state_dict(), tmp_path / "state")
    resumed = gradclip.Monitor(capacity=3)
    resumed.record(1.0, 1.0)
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert_same_records(resumed, monitor)
    assert resumed.counts == monitor.counts == Counts(5, 2, 1, 1)
    for one in (monitor, resumed):
        one.record(9.0, 1.0)
    assert_same_records(resumed, monitor)
    small = gradclip.Monitor(capacity=1)
    small.load_state_dict(monitor.state_dict())
    assert [step.step for step in small.records] == [6]


@pytest.mark.after_error
@pytest.mark.parametrize(
    "broken",
    [
        *({}, {"norm": [1.0]}, {"counts": [1, 2, 3, 4, 5]}, {"counts": ["a", 2]}, {"norm": [1.0, "x", 2.0]}),
        {"layers": [[], [], [0, 1.0, 2.0]]},
        {"layers": [[], [], [-1, 1.0]]},
        {"names": [[1]]},
        {"counts": [2, 0, 0, 0]},
        {"counts": [5, 9, 1, 1]},
        {"counts": [math.inf, 2, 1, 1]},
        {"calls": "3"},
        {"step": [4, 5, math.inf]},
        {"step": [4, 5, 10**400]},
        {"step": [4, 4, 5]},
        {"step": [4.5, 5.0, 6.0]},
        {"norm": [1.0, 2.0, 10**400]},
        {"norm": [1.0, 2.0, "3"]},
        {"norm": [1.0, 2.0, 1j]},
        {"skipped": [False, "no", True]},
        {"skipped": None},
    ],
)
def test_a_state_that_is_none_changes_nothing(broken):
    monitor = some()
    before = repr(monitor.records)
    with pytest.raises(ValueError, match="not the state of a Monitor"):
        monitor.load_state_dict({**some().state_dict(), **broken} if broken else {})
    assert repr(monitor.records) == before


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
    assert monitor.advise().max_norm == 2.0
