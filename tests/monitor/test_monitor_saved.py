"""What a monitor kept is saved and loaded, as lines, copies and states."""

import math

import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.monitor.records import Counts


def some():
    monitor = gradclip.Monitor(capacity=3)
    monitor.record(2.0, 1.0)
    monitor.record(np.array([0.5, math.nan, 3.0]), np.array([1.0, 1.0, math.inf]), nonfinite="skip")
    monitor.record(torch.tensor(7.0), 5.0, layer_norms={"a": torch.tensor(1.5)}, loss=torch.tensor(0.75))
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


def test_files_and_states_without_losses_are_loaded(tmp_path):
    monitor, path = gradclip.Monitor(), tmp_path / "steps.jsonl"
    path.write_text('{"step": 1, "norm": 2.0, "max_norm": 1.0, "skipped": false}\n')
    monitor.load_state_dict({name: value for name, value in some().state_dict().items() if name != "loss"})
    assert np.isnan(monitor.columns.losses).all()
    assert gradclip.Monitor.load(path).last.loss is math.nan


def test_losses_that_are_not_finite_are_saved_and_loaded(tmp_path):
    monitor = gradclip.Monitor()
    monitor.record(np.ones(3), 1.0, loss=np.array([math.inf, math.nan, 0.5]))
    monitor.save(tmp_path / "steps.jsonl")
    loaded, resumed = gradclip.Monitor.load(tmp_path / "steps.jsonl"), gradclip.Monitor()
    resumed.load_state_dict(monitor.state_dict())
    assert loaded.records == resumed.records == monitor.records
    np.testing.assert_array_equal(loaded.columns.losses, [math.inf, math.nan, 0.5])


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
        {"loss": [1.0, 2.0]},
        {"loss": [1.0, 2.0, "3"]},
    ],
)
def test_a_state_that_is_none_changes_nothing(broken):
    monitor = some()
    before = repr(monitor.records)
    with pytest.raises(ValueError, match="not the state of a Monitor"):
        monitor.load_state_dict({**some().state_dict(), **broken} if broken else {})
    assert repr(monitor.records) == before
