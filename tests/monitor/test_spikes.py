"""Which steps are spikes, which are kept, and which layers are to blame."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip
from gradclip._src.monitor.advice import advise
from gradclip._src.monitor.pending import FetchedStep
from gradclip._src.monitor.records import Layers, Step
from gradclip._src.monitor.spikes import Spikes


def seen(norms, layers=None, first=1):
    names = ("a", "b")
    rows = [None] * len(norms) if layers is None else [Layers(names, np.array(row)) for row in layers]
    return [
        FetchedStep(Step(i, norm, 1.0), row, i) for i, (norm, row) in enumerate(zip(norms, rows, strict=True), first)
    ]


def found(norms, layers=None, keep=5):
    spikes = Spikes(keep)
    spikes.see(seen(norms, layers))
    return spikes.kept()


def test_a_spike_is_more_than_ten_times_the_median_before():
    (spike,) = found([1.0] * 20 + [10.0, 10.1, 1.0])
    assert (spike.step, spike.norm, spike.level, spike.times, spike.context) == (22, 10.1, 1.0, 10.1, 22)
    assert found([1.0] * 4 + [100.0]) == []
    assert len(found([1.0] * 5 + [100.0])) == 1


def test_a_step_that_was_skipped_is_a_spike_whatever_its_norm():
    monitor = gradclip.Monitor(keep_spikes=3)
    for norm, most in [(3.0, 2.0), (1.0, math.inf), *[(1.0, 4.0)] * 20, (8.5, 4.0), (9.0, math.inf), (30.0, math.inf)]:
        monitor.record(norm, 1.0, skip_above=most)
    early, late, large = monitor.spikes
    assert (early.step, early.skipped, math.isnan(early.level)) == (1, True, True)
    assert (late.step, late.skipped, late.times) == (23, True, 8.5)
    assert (large.step, large.skipped) == (25, False)
    assert str(early) == "Step 1: the norm was 3, and the step was skipped."
    monitor.record(40.0, 1.0)
    assert [spike.step for spike in monitor.spikes] == [23, 25, 26]


def test_there_are_as_many_spikes_as_the_advice_says():
    norms = np.exp(np.random.default_rng(0).standard_normal(1000) * 1.5)
    norms[::7] = 0.0
    monitor = gradclip.Monitor(keep_spikes=1000)
    monitor.record(norms, 1.0)
    assert len(monitor.spikes) == advise(monitor.columns).spikes > 20


@pytest.mark.parametrize("every", [1, 7, 300])
def test_when_steps_are_fetched_changes_no_spike(every):
    norms = np.exp(np.random.default_rng(1).standard_normal(300) * 1.5).tolist()
    norms[100:105] = [math.nan] * 5
    norms[200] = 0.0
    steps, spikes = seen(norms), Spikes(300)
    for start in range(0, 300, every):
        spikes.see(steps[start : start + every])
    assert repr(spikes.kept()) == repr(found(norms, keep=300))


def test_the_largest_are_kept_and_of_those_that_are_not_finite_the_last():
    norms = [1.0] * 20 + [30.0, 20.0, 50.0, 40.0] + [1.0, math.nan, math.nan, 1.0, math.inf, 1.0, math.nan, 1.0]
    kept = found(norms, keep=2)
    assert [spike.step for spike in kept] == [23, 24, 29, 31]
    assert [spike.step for spike in found(norms, keep=5)] == [21, 22, 23, 24, 26, 29, 31]
    assert found(norms, keep=0) == []


def test_layers_are_ranked_by_what_they_added_and_compared_with_their_own_past():
    rows = [[3.0, 0.25]] * 10 + [[3.0, 1.0]] * 2 + [[3.0, 4.0]]
    (spike,) = found([1.0] * 12 + [100.0], rows)
    b, a = spike.layers
    assert (b.name, b.norm, b.share, b.times, b.since) == ("b", 4.0, 16 / 25, 16.0, 11)
    assert (a.name, a.norm, a.share, a.times, a.since) == ("a", 3.0, 9 / 25, 1.0, 13)
    assert spike.since == 11


def test_the_larger_layer_is_not_to_blame_if_it_always_was_larger():
    rows = [[40.0, 0.5]] * 12 + [[40.0, 30.0]]
    (spike,) = found([1.0] * 12 + [100.0], rows)
    assert [layer.name for layer in spike.layers] == ["b", "a"]
    assert spike.layers[0].share == pytest.approx(0.36)


def test_layers_without_a_past():
    rows = [[0.0, math.nan]] * 6 + [[3.0, 4.0]]
    *_, spike = found([1.0] * 6 + [100.0], rows)
    assert [(layer.name, layer.since) for layer in spike.layers] == [("b", 1), ("a", 7)]
    assert all(math.isnan(layer.times) for layer in spike.layers)


def test_layers_that_are_not_finite_come_first():
    rows = [[1.0, 1.0]] * 6 + [[1e30, math.nan]]
    (spike,) = found([1.0] * 6 + [math.nan], rows)
    assert [layer.name for layer in spike.layers] == ["b", "a"]
    assert (spike.layers[0].since, spike.level) == (7, 1.0)
    (spike,) = found([1.0] * 7, rows)  # the norm is that of the finite elements
    assert (spike.finite, spike.step) == (False, 7)


def test_layers_so_large_that_their_squares_overflow():
    rows = [[1.0, 1.0]] * 6 + [[3e200, 4e200]]
    (spike,) = found([1.0] * 6 + [5e200], rows)
    assert [round(layer.share, 12) for layer in spike.layers] == [0.64, 0.36]


@pytest.mark.parametrize("before", [1e200, 1.7e308])
def test_a_past_so_large_that_its_squares_or_its_median_overflow(before):
    (spike,) = found([1.0] * 6 + [100.0], [[1.0, before]] * 6 + [[2.0, 1.0]])
    a, b = spike.layers
    assert (a.name, a.times, a.since, b.name, b.times, b.since) == ("a", 2.0, 7, "b", pytest.approx(0.0, abs=1e-199), 7)


def test_a_past_of_other_layers_does_not_count():
    spikes = Spikes(5)
    spikes.see(seen([1.0] * 6, [[1.0, 1.0]] * 6))
    spikes.see([FetchedStep(Step(7, 100.0, 1.0), Layers(("a",), np.array([100.0])))])
    (layer,) = spikes.kept()[0].layers
    assert (layer.name, layer.since, math.isnan(layer.times)) == ("a", 7, True)


def test_what_a_scan_returns():
    def step(carry, x):
        grads = {"w": x * jnp.array([3.0, 4.0]), "b": jnp.array([0.5])}
        _, norm = gradclip.clip_by_global_norm(grads, 1.0)
        return carry, (norm, gradclip.layer_norms(grads))

    scales = jnp.ones(20).at[15].set(100.0)
    _, (norms, layers) = jax.jit(lambda: jax.lax.scan(step, 0.0, scales))()
    monitor = gradclip.Monitor()
    monitor.record(norms, 1.0, layer_norms=layers, loss=2 * scales, context=[f"batch {i}" for i in range(20)])
    (spike,) = monitor.spikes
    assert (spike.step, spike.layers[0].name, spike.loss, spike.context) == (16, "w", 200.0, "batch 15")
    assert spike.layers[0].times == pytest.approx(100.0)


def test_a_copy_goes_on_by_itself():
    spikes = Spikes(5)
    spikes.see(seen([1.0] * 10, [[1.0, 1.0]] * 10))
    copied = Spikes.of_plain(spikes.plain())
    copied.see(seen([100.0], [[1.0, 99.0]], first=11))
    assert (len(copied.kept()), spikes.kept()) == (1, [])
    assert copied.kept()[0].layers[0].times == 99.0
