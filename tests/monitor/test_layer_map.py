"""The map of layers: which are shown, by which names, and in which colours."""

import math

import numpy as np
from matplotlib.figure import Figure

from gradclip.monitor import layer_map
from gradclip.monitor.looks import Look
from gradclip.monitor.records import Layers, LayerTable, Step


def drawn(panel, *given):
    figure = Figure()
    axes = figure.add_subplot()
    panel(axes, *given, Look())
    figure.draw_without_rendering()
    return axes


def test_a_dollar_in_a_name_is_a_letter():
    layers = Layers(("w$a$", "w$\\frac$"), np.array([2.0, 1.0], np.float32))
    axes = drawn(layer_map.layers_over_steps, LayerTable.of([Step(1, 1.0, 1.0, layers=layers)]), np.array([1]))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["w$a$", "w$\\frac$"]


def test_layers_have_the_largest_first():
    layers = Layers(("m.small.w", "m.large.w"), np.array([1.0, 2.0], np.float32))
    table = LayerTable.of([Step(i, 1.0, 1.0, layers=layers) for i in (1, 2)])
    axes = drawn(layer_map.layers_over_steps, table, table.steps)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["large", "small"]
    assert axes.images[0].get_array().shape == (2, 2)


def test_layers_without_a_drawable_norm():
    for norms in ([math.nan, 0.0], [1.0, 1.0]):
        layers = Layers(("a", "b"), np.array(norms, np.float32))
        drawn(layer_map.layers_over_steps, LayerTable.of([Step(1, 1.0, 1.0, layers=layers)]), np.array([1]))


def test_names_are_cut_to_what_tells_them_apart():
    assert layer_map.told_apart(["net.0.weight", "net.1.weight"]) == ["0", "1"]
    assert layer_map.told_apart(["net.0.weight", "net.0.bias"]) == ["weight", "bias"]
    assert layer_map.told_apart(["a", "b.c"]) == ["a", "b.c"]
    assert layer_map.told_apart(["a.b"]) == ["b"]
    assert layer_map.shortened("abcdefghij", 7) == "abc…hij"
    assert layer_map.shortened("abc", 7) == "abc"


def table(**norms):
    rows = zip(*norms.values(), strict=True)
    return LayerTable.of(
        [Step(i, 1.0, 1.0, layers=Layers(tuple(norms), np.array(row, np.float32))) for i, row in enumerate(rows, 1)]
    )


def test_a_spike_does_not_flatten_the_colours():
    usual = [1.0, 1.5, 2.0] * 10
    norms = np.array([usual, [0.1] * 30])
    assert layer_map.colour_range(norms) == (0.1, 2.0)
    norms[0, 7] = 1e6
    low, high = layer_map.colour_range(norms)
    assert (low, 2.0 <= high <= 10.0) == (0.1, True)
    assert layer_map.colour_range(np.full((2, 3), math.nan)) == (1.0, 1.1)
    assert layer_map.colour_range(np.array([[3.0]])) == (3.0, 3.3000000000000003)


def test_a_trend_keeps_its_colours():
    norms = np.geomspace(1.0, 1000.0, 50)[None]
    assert layer_map.colour_range(norms) == (1.0, 1000.0)


def test_a_norm_beyond_the_colours_has_a_mark():
    given = table(a=[1.0] * 20 + [500.0] + [1.0] * 9, b=[2.0] * 30)
    axes = drawn(layer_map.layers_over_steps, given, given.steps)
    (marks,) = axes.lines
    assert (marks.get_xdata().tolist(), marks.get_ydata().tolist()) == ([21.0], [1])
    assert axes.get_xlim() == (0.5, 30.5)
    plain = table(a=[1.0] * 30, b=[2.0] * 30)
    assert drawn(layer_map.layers_over_steps, plain, plain.steps).lines[0].get_xdata().tolist() == []


def test_the_steps_are_those_of_the_run():
    given = table(a=[1.0, 1.0], b=[2.0, 2.0])
    assert drawn(layer_map.layers_over_steps, given, np.arange(1, 101)).get_xlim() == (0.5, 100.5)
