"""Thresholds that follow and monitors: the same as on the CPU, and nothing waits until they are read."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import gradclip
from gradclip import AdaptiveThreshold, QuantileRule, SpreadRule, SteadyRule
from on_gpu import DEVICE, ON, grads, held, on_host

pytestmark = pytest.mark.gpu
NORMS = [1.0, 1.5, 0.5, 40.0, 2.0, 1.25, 1.0, 300.0, 0.75, 1.5, 0.001, 2.5]
RULES = {
    "spread": SpreadRule,
    "steady": SteadyRule,
    "quantile": QuantileRule,
    "quantile of four": lambda: QuantileRule(window=4),
}


def gradients(norm, device=DEVICE, dtype=torch.float32):
    """Return gradients with a norm: (3, 4) and 12, over 13."""
    return [torch.tensor(x, dtype=torch.float64).mul(norm / 13).to(device, dtype) for x in ([3.0, 4.0], [12.0])]


def run(max_norm, norms, device, policy="propagate", monitor=None, waits=ON.waiting_is_an_error):
    """Clip in steps and return the gradients after each, and the thresholds. Nothing is read before the last step."""
    steps = [held(gradients(norm, device)) for norm in norms]
    thresholds = []
    with waits():
        for holders in steps:
            gradclip.clip_grad_norm_(holders, max_norm, nonfinite=policy, monitor=monitor)
            thresholds.append(getattr(max_norm, "max_norm", max_norm))
    return [np.concatenate(on_host(grads(holders))) for holders in steps], list(map(float, thresholds))


def compare(made, norms, policy="propagate"):
    """Run the same steps on the device and on the CPU, and return both holders."""
    here, there = made(), made()
    found, thresholds = run(there, norms, DEVICE, policy)
    wanted, known = run(here, norms, "cpu", policy)
    assert thresholds == pytest.approx(known, rel=1e-5)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5)
    assert (there.steps, there.num_clipped, there.num_skipped) == (here.steps, here.num_clipped, here.num_skipped)
    return here, there


@pytest.mark.parametrize("rule", RULES)
def test_thresholds_are_those_of_the_cpu(rule):
    here, there = compare(lambda: AdaptiveThreshold(RULES[rule]()), NORMS)
    assert here.steps == 12
    assert here.num_clipped > 1
    assert float(there.next_max_norm) == pytest.approx(float(here.next_max_norm), rel=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_thresholds_of_layers_are_those_of_the_cpu(rule):
    here, there = (AdaptiveThreshold(RULES[rule]()) for _ in range(2))
    for norm in [*NORMS, math.nan, 1.0]:
        wanted, found = held(gradients(norm, "cpu")), held(gradients(norm))
        gradclip.clip_grad_layer_norm_(wanted, here, nonfinite="drop")
        with ON.waiting_is_an_error():
            gradclip.clip_grad_layer_norm_(found, there, nonfinite="drop")
        for x, y in zip(on_host(grads(found)), on_host(grads(wanted)), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5)
    assert (there.steps, there.num_clipped, there.num_skipped) == (here.steps, here.num_clipped, here.num_skipped)


@pytest.mark.parametrize("skip_above", [2.0, 20.0])
def test_skipped_spikes(skip_above):
    here, _ = compare(lambda: AdaptiveThreshold(QuantileRule(window=8), skip_above=skip_above), NORMS)
    assert here.num_skipped > 0


@pytest.mark.parametrize("policy", ["propagate", "drop", "zero"])
def test_what_is_not_finite(policy):
    norms = [1.0, 2.0, math.nan, 1.0, math.inf, 50.0]
    here, _ = compare(AdaptiveThreshold, norms, policy)
    assert here.num_skipped == (2 if policy == "drop" else 0)


def test_by_hand():
    """The first step sets the level, so the second is clipped from 50 to 5."""
    max_norm = AdaptiveThreshold()
    found, thresholds = run(max_norm, [5.0, 50.0], DEVICE)
    assert thresholds[1] == pytest.approx(5.0, rel=1e-6)
    np.testing.assert_allclose(found[1], np.array([3, 4, 12]) * 5 / 13, rtol=1e-5)
    assert (max_norm.steps, max_norm.num_clipped, max_norm.num_skipped) == (2, 1, 0)


def test_state_moves_from_device_to_host():
    max_norm, other = AdaptiveThreshold(), AdaptiveThreshold()
    run(max_norm, NORMS[:6], DEVICE)
    other.load_state_dict(max_norm.state_dict())
    found, _ = run(max_norm, NORMS[6:], DEVICE)
    wanted, _ = run(other, NORMS[6:], "cpu")
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5)


def test_a_later_step_does_not_wait():
    """The first one moves the history to the device."""
    max_norm = AdaptiveThreshold()
    run(max_norm, [1.0], DEVICE, waits=nullcontext)
    found, _ = run(max_norm, [10.0], DEVICE)
    np.testing.assert_allclose(found[0], np.array([3, 4, 12]) / 13, rtol=1e-5)


def test_rules_by_hand():
    rule = QuantileRule()
    history = rule.init(torch.zeros((), device=DEVICE))
    for norm in NORMS[:5]:
        history = rule.observe(history, torch.tensor(norm, device=DEVICE))
    threshold = rule.max_norm(history)
    assert threshold.device.type == DEVICE.type
    known = rule.init(np.zeros((), np.float32))
    for norm in NORMS[:5]:
        known = rule.observe(known, np.float32(norm))
    assert float(threshold) == pytest.approx(float(rule.max_norm(known)), rel=1e-5)


@pytest.mark.parametrize("layers_every", [0, 1, 2])
@pytest.mark.parametrize("policy", ["propagate", "drop", "zero"])
def test_a_monitor_records_the_same(layers_every, policy):
    norms, found = [*NORMS, math.nan, 3.0], []
    for device in (DEVICE, "cpu"):
        monitor = gradclip.Monitor(layers_every=layers_every)
        run(1.25, norms, device, policy, monitor)
        found.append(monitor)
    there, here = found
    assert (there.steps, there.num_clipped, there.num_skipped, there.num_nonfinite) == (
        here.steps,
        here.num_clipped,
        here.num_skipped,
        here.num_nonfinite,
    )
    assert there.num_clipped > 3
    for one, other in zip(there.records, here.records, strict=True):
        assert one.norm == pytest.approx(other.norm, rel=1e-6, nan_ok=True)
        assert one.coefficient == pytest.approx(other.coefficient, rel=1e-5, nan_ok=True)
        assert one.max_norm == other.max_norm
    if layers_every:
        assert there.top_layers == pytest.approx(here.top_layers, rel=1e-6)


def test_a_monitor_of_an_adaptive_threshold():
    found = []
    for device in (DEVICE, "cpu"):
        monitor = gradclip.Monitor()
        run(AdaptiveThreshold(QuantileRule(window=8), skip_above=20.0), NORMS, device, monitor=monitor)
        found.append([(one.norm, one.max_norm) for one in monitor.records])
    assert np.array(found[0]) == pytest.approx(np.array(found[1]), rel=1e-5)


def test_a_monitor_of_groups():
    monitor = gradclip.Monitor()
    holders = held(gradients(26.0))  # (6, 8) and 24
    groups = [{"params": holders[:1], "max_norm": 5.0, "name": "first"}, {"params": holders[1:]}]
    with ON.waiting_is_an_error():
        norm = gradclip.clip_grad_norm_(groups, 12.0, monitor=monitor)
    assert float(norm) == pytest.approx(26.0, rel=1e-6)
    first = monitor.groups["first"].last
    assert (first.norm, first.max_norm) == (pytest.approx(10.0, rel=1e-6), 5.0)
    assert (monitor.last.norm, monitor.last.max_norm) == (pytest.approx(24.0, rel=1e-6), 12.0)
    np.testing.assert_allclose(np.concatenate(on_host(grads(holders))), [3.0, 4.0, 12.0], rtol=1e-5)
