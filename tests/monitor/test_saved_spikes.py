"""Spikes as plain values, for any checkpoint format."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.monitor.records import LayerOfSpike, Spike
from gradclip._src.monitor.saved import plain_of, spike_of

LAYERS = (LayerOfSpike("head", math.inf, math.nan, 3.0, 149), LayerOfSpike("body", 2.0, 0.5, math.nan, 151))
SPIKE = Spike(151, math.inf, 0.5, 3.25, "batch 151", LAYERS, 1.0, True, False)
ITSELF: list[object] = [1]
ITSELF.append(ITSELF)


def test_a_spike_goes_through_json():
    assert repr(spike_of(json.loads(json.dumps(plain_of(SPIKE))))) == repr(SPIKE)


def test_a_spike_goes_through_a_checkpoint_of_weights_only(tmp_path):
    torch.save(plain_of(SPIKE._replace(context=torch.tensor([1, 2]))), tmp_path / "spike")
    loaded = spike_of(torch.load(tmp_path / "spike", weights_only=True))
    assert loaded.context == [1, 2]


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (None, None),
        ({"ids": np.array([1, 2]), 3: (4.5, True)}, {"ids": [1, 2], "3": [4.5, True]}),
        (np.int64(7), 7),
        (b"ab", "b'ab'"),
        (math, repr(math)),
        (np.array(["2026-01-02"], "M8[D]"), ["datetime.date(2026, 1, 2)"]),
        (np.array([1 + 2j]), ["(1+2j)"]),
        (np.array([math, 3], object), [repr(math), 3]),
        (ITSELF, repr(ITSELF)),
    ],
)
def test_contexts_become_plain(context, expected):
    assert plain_of(SPIKE._replace(context=context))["context"] == expected


def test_an_array_that_was_deleted_loses_no_checkpoint():
    deleted = jnp.ones(3)
    deleted.delete()
    told = plain_of(SPIKE._replace(context=[1, deleted]))["context"]
    assert isinstance(told, str)
    assert "Context: " in str(SPIKE._replace(context=[1, deleted]))


def with_spikes(spikes):
    monitor = gradclip.Monitor()
    monitor.record(np.ones(3), 1.0)
    return monitor.state_dict() | {"spikes": spikes}


@pytest.mark.after_error
@pytest.mark.parametrize(
    "broken", [[1], [{}], 3, [plain_of(SPIKE) | {"norm": "x"}], [plain_of(SPIKE) | {"layers": [1]}]]
)
def test_a_state_with_broken_spikes_changes_nothing(broken):
    monitor = gradclip.Monitor()
    with pytest.raises(ValueError, match="this is not the state of a Monitor"):
        monitor.load_state_dict(with_spikes(broken))
    assert monitor.steps == 0


def test_a_state_that_was_saved_before_there_were_spikes_finds_those_of_its_steps():
    monitor, loaded = gradclip.Monitor(), gradclip.Monitor()
    monitor.record(np.array([1.0] * 9 + [50.0]), 1.0)
    loaded.load_state_dict({name: value for name, value in monitor.state_dict().items() if name != "spikes"})
    assert [spike.step for spike in loaded.spikes] == [10]


def test_lines_find_the_spikes_of_their_steps_again(tmp_path):
    monitor = gradclip.Monitor()
    monitor.record(
        np.array([1.0] * 9 + [50.0]), 1.0, layer_norms={"a": np.array([1.0] * 9 + [50.0])}, context=range(10)
    )
    monitor.save(tmp_path / "steps")
    (spike,) = gradclip.Monitor.load(tmp_path / "steps").spikes
    assert (spike.step, spike.layers[0].times, spike.context, monitor.spikes[0].context) == (10, 50.0, None, 9)


def test_a_smaller_monitor_keeps_fewer_of_a_state():
    monitor, small = gradclip.Monitor(), gradclip.Monitor(keep_spikes=1)
    monitor.record(np.array([1.0] * 9 + [50.0, 80.0, 60.0]), 1.0)
    small.load_state_dict(monitor.state_dict())
    assert [spike.norm for spike in small.spikes] == [80.0]
