"""The callback of a monitor gets every step once and in order, whatever threads record and read."""

from threading import Event, Thread

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip


def test_the_callback_gets_plain_floats_in_order_once_values_are_fetched():
    told = []
    monitor = gradclip.Monitor(fetch_every=2, top=1, callback=lambda step, numbers: told.append((step, numbers)))
    monitor.record(torch.tensor(5.0), 1.0, layer_norms={"a": torch.tensor(3.0), "b": torch.tensor(4.0)})
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
