"""A monitor of groups with thresholds of their own: the common part is the step, each group has a monitor."""

import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

import gradclip


def clip(monitor, size=1.0, *, common=True, nonfinite="propagate"):
    held = [SimpleNamespace(grad=np.array(grad)) for grad in ([3.0, 4.0], [6.0 * size, 8.0], [30.0, 40.0])]
    groups = [
        {"params": [held[0]], **({} if common else {"max_norm": 2.5})},
        {"params": [held[1]], "max_norm": 2.0, "name": "head"},
        {"params": [held[2]], "max_norm": None},
    ]
    return gradclip.clip_grad_norm_(groups, 1.0, monitor=monitor, nonfinite=nonfinite)


def of(step):
    return step.norm, step.max_norm, step.coefficient, step.clipped


def test_the_common_part_is_the_step_and_each_group_has_a_monitor():
    monitor = gradclip.Monitor(layers_every=1)
    clip(monitor)
    assert of(monitor.last) == (5.0, 1.0, 0.2, True)
    assert list(monitor.groups) == ["head", "parameters.2"]
    assert of(monitor.groups["head"].last) == (10.0, 2.0, 0.2, True)
    assert of(monitor.groups["parameters.2"].last) == (50.0, math.inf, 1.0, False)
    assert monitor.last.layers.norms.tolist() == [5.0, 10.0, 50.0]


def test_without_a_common_part_the_last_group_is_the_step():
    monitor = gradclip.Monitor()
    clip(monitor, common=False)
    assert of(monitor.last) == (50.0, math.inf, 1.0, False)
    assert of(monitor.groups["parameters.0"].last) == (5.0, 2.5, 0.5, True)
    by_name = gradclip.Monitor()
    tree = {"encoder": np.array([3.0, 4.0]), "head": np.array([6.0, 8.0])}
    gradclip.clip_grad_norm_(tree, {"encoder": 1.0, "*": 5.0}, monitor=by_name)
    assert of(by_name.last) == (10.0, 5.0, 0.5, True)
    assert {name: one.num_clipped for name, one in by_name.groups.items()} == {"encoder": 1, "*": 1}


def test_what_is_not_finite_in_one_group_is_so_for_all():
    monitor = gradclip.Monitor()
    for policy in ("drop", "propagate"):
        clip(monitor, math.nan, nonfinite=policy)
    clip(monitor)
    for one in (monitor, *monitor.groups.values()):
        assert [(step.skipped, step.finite) for step in one.records] == [(True, False), (False, False), (False, True)]
    layers = monitor.groups["head"].spikes[0].layers
    assert [(layer.name, layer.finite) for layer in layers] == [("parameters.1.params.0", False)]
    assert [layer.name for layer in monitor.spikes[0].layers if not layer.finite] == ["parameters.1.params.0"]


def test_a_call_that_raises_names_the_layer():
    monitor = gradclip.Monitor()
    with pytest.raises(FloatingPointError):
        clip(monitor, math.nan, nonfinite="raise")
    assert [layer.name for layer in monitor.spikes[0].layers if not layer.finite] == ["parameters.1.params.0"]
    assert (monitor.steps, monitor.groups) == (0, {})


def test_an_adaptive_threshold_of_a_group_is_recorded():
    monitor, own = gradclip.Monitor(), gradclip.AdaptiveThreshold(skip_above=2.0)
    for size in (1.0, 1.0, 1.0, 100.0):
        held = [SimpleNamespace(grad=np.array([3.0, 4.0]) * scale) for scale in (1.0, size)]
        gradclip.clip_grad_norm_([{"params": held[:1]}, {"params": held[1:], "max_norm": own}], 1.0, monitor=monitor)
    (group,) = monitor.groups.values()
    assert [(step.norm, step.skipped) for step in group.records] == [(5.0, False)] * 3 + [(500.0, True)]
    assert group.last.max_norm == own.max_norm
    assert (monitor.num_skipped, monitor.num_clipped) == (0, 4)


def test_the_callback_is_told_of_groups():
    told = []
    monitor = gradclip.Monitor(fetch_every=1, callback=lambda step, numbers: told.append((step, numbers)))
    clip(monitor)
    numbers = {key: value for _, one in told for key, value in one.items()}
    assert {step for step, _ in told} == {1}
    assert (numbers["norm"], numbers["coefficient"]) == (5.0, 0.2)
    assert (numbers["groups/head/norm"], numbers["groups/head/max_norm"]) == (10.0, 2.0)
    assert numbers["groups/parameters.2/coefficient"] == 1.0


def test_groups_are_copied_saved_and_loaded():
    monitor = gradclip.Monitor(fetch_every=7)
    clip(monitor)
    loaded = gradclip.Monitor()
    loaded.load_state_dict(monitor.state_dict())
    for other in (loaded, pickle.loads(pickle.dumps(monitor))):
        assert repr({name: one.records for name, one in other.groups.items()}) == repr(
            {name: one.records for name, one in monitor.groups.items()}
        )
    clip(loaded)
    assert loaded.groups["head"].steps == 2
    plain = gradclip.Monitor()
    plain.record(1.0, 1.0)
    assert "groups" not in plain.state_dict()
    loaded.load_state_dict(plain.state_dict())
    assert loaded.groups == {}


@pytest.mark.parametrize("groups", [None, [], {1: {}}, {"head": {}}, {"head": None}, {"head": {"groups": {}}}])
def test_a_state_with_bad_groups_changes_nothing(groups):
    monitor = gradclip.Monitor()
    clip(monitor)
    before = repr(monitor.state_dict())
    with pytest.raises(ValueError, match="this is not the state of a Monitor"):
        monitor.load_state_dict({**monitor.state_dict(), "groups": groups})
    assert repr(monitor.state_dict()) == before
