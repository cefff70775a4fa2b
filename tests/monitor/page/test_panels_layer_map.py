"""The map of layers: which are shown, by which names, and in which colours."""

import math

import numpy as np

import gradclip
from drawn_panels import drawn
from gradclip._src.monitor.page import panels
from gradclip._src.monitor.page.panels import LayerMap
from gradclip._src.monitor.records import Counts, Layers, LayerTable, Overview, Step


def of_all(table):
    """Return the map of a table of which every row is sampled."""
    return LayerMap(table, np.ones(len(table.steps), bool), np.array([], int))


def test_a_dollar_in_a_name_is_a_letter():
    layers = Layers(("w$a$", "w$\\frac$"), np.array([2.0, 1.0], np.float32))
    axes = drawn(panels.layers_over_steps, of_all(LayerTable.of([Step(1, 1.0, 1.0, layers=layers)])), np.array([1]))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["w$a$", "w$\\frac$"]


def test_layers_have_the_largest_first():
    layers = Layers(("m.small.w", "m.large.w"), np.array([1.0, 2.0], np.float32))
    table = LayerTable.of([Step(i, 1.0, 1.0, layers=layers) for i in (1, 2)])
    axes = drawn(panels.layers_over_steps, of_all(table), table.steps)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["large", "small"]
    assert axes.images[0].get_array().shape == (2, 2)


def test_layers_without_a_drawable_norm():
    for norms in ([math.nan, 0.0], [1.0, 1.0]):
        layers = Layers(("a", "b"), np.array(norms, np.float32))
        drawn(panels.layers_over_steps, of_all(LayerTable.of([Step(1, 1.0, 1.0, layers=layers)])), np.array([1]))


def test_names_are_cut_to_what_tells_them_apart():
    assert panels.told_apart(["net.0.weight", "net.1.weight"]) == ["0", "1"]
    assert panels.told_apart(["net.0.weight", "net.0.bias"]) == ["weight", "bias"]
    assert panels.told_apart(["a", "b.c"]) == ["a", "b.c"]
    assert panels.told_apart(["a.b"]) == ["b"]
    assert panels.shortened("abcdefghij", 7) == "abc…hij"
    assert panels.shortened("abc", 7) == "abc"


def table(**norms):
    rows = zip(*norms.values(), strict=True)
    return LayerTable.of(
        [Step(i, 1.0, 1.0, layers=Layers(tuple(norms), np.array(row, np.float32))) for i, row in enumerate(rows, 1)]
    )


def test_a_spike_does_not_flatten_the_colours():
    usual = [1.0, 1.5, 2.0] * 10
    norms = np.array([usual, [0.1] * 30])
    assert panels.colour_range(norms) == (0.1, 2.0)
    norms[0, 7] = 1e6
    low, high = panels.colour_range(norms)
    assert (low, 2.0 <= high <= 10.0) == (0.1, True)
    assert panels.colour_range(np.full((2, 3), math.nan)) == (1.0, 1.1)
    assert panels.colour_range(np.array([[3.0]])) == (3.0, 3.3000000000000003)


def test_a_trend_keeps_its_colours():
    norms = np.geomspace(1.0, 1000.0, 50)[None]
    assert panels.colour_range(norms) == (1.0, 1000.0)


def test_a_norm_beyond_the_colours_has_a_mark():
    given = table(a=[1.0] * 20 + [500.0] + [1.0] * 9, b=[2.0] * 30)
    axes = drawn(panels.layers_over_steps, of_all(given), given.steps)
    (marks,) = axes.lines
    assert (marks.get_xdata().tolist(), marks.get_ydata().tolist()) == ([21.0], [1])
    assert axes.get_xlim() == (0.5, 30.5)
    plain = table(a=[1.0] * 30, b=[2.0] * 30)
    assert drawn(panels.layers_over_steps, of_all(plain), plain.steps).lines[0].get_xdata().tolist() == []


def test_the_steps_are_those_of_the_run():
    given = table(a=[1.0, 1.0], b=[2.0, 2.0])
    assert drawn(panels.layers_over_steps, of_all(given), np.arange(1, 101)).get_xlim() == (0.5, 100.5)


def watched(spikes, *, every=10, keep=5, steps=100):
    """Return what a monitor shows that samples some steps, of norms that are 1 but at spikes of one layer."""
    monitor = gradclip.Monitor(layers_every=every, keep_spikes=keep)
    for step in range(1, steps + 1):
        grads = {"a": np.array([2.0]), "b": np.array([1000.0 + step if step in spikes else 1.0])}
        gradclip.clip_grad_norm_(grads, math.inf, monitor=monitor)
    return Overview.of(monitor.records, monitor.counts, 5, monitor.spikes)


def test_a_spike_between_sampled_steps_is_in_the_map():
    seen = LayerMap.of(watched({55}))
    assert seen.table.steps[~seen.sampled].tolist() == [55]
    assert seen.missed.tolist() == []
    axes = drawn(panels.layers_over_steps, seen, np.arange(1, 101))
    norms = axes.images[0].get_array()
    assert norms.shape == (2, 10)
    assert np.asarray(norms[1]).tolist() == [1.0] * 5 + [1055.0] + [1.0] * 4
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b"]
    assert axes.lines[0].get_xdata().tolist() == [55.5]
    assert axes.get_xlabel() == "step"


def test_spikes_that_were_not_measured_are_marked():
    seen = LayerMap.of(watched({33, 55, 77}, keep=1))
    assert seen.table.steps[~seen.sampled].tolist() == [77]
    assert seen.missed.tolist() == [33, 55]
    axes = drawn(panels.layers_over_steps, seen, np.arange(1, 101))
    assert axes.lines[-1].get_xdata().tolist() == [33, 55]
    assert "2 spikes were not measured" in axes.get_xlabel()
    alone = LayerMap.of(watched({33}, keep=0))
    assert "a spike was not measured" in drawn(panels.layers_over_steps, alone, np.arange(1, 101)).get_xlabel()


def test_many_spikes_do_not_flatten_the_colours():
    axes = drawn(panels.layers_over_steps, LayerMap.of(watched({15, 25, 35, 55, 75})), np.arange(1, 101))
    assert axes.images[0].norm.vmax <= 6


def test_without_sampled_steps_there_is_no_map():
    assert LayerMap.of(watched({55}, every=0)) is None
    assert LayerMap.of(Overview.of([], Counts(), 5)) is None
