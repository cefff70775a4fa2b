"""Panels in axes: what is drawn, of ordinary runs and of those with nothing to draw."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from gradclip.monitor import panels
from gradclip.monitor.records import Columns, Layers, LayerTable, Step

NORMS = [0.5, 2.0, math.nan, 3.0, math.inf, 0.0]


def columns(norms, max_norm=1.0):
    return Columns.of(
        [Step(i, float(x), max_norm, skipped=bool(np.isinf(x))) for i, x in enumerate(norms, 1)],
    )


def drawn(panel, *given):
    figure = Figure()
    axes = figure.add_subplot()
    panel(axes, *given, panels.Look())
    figure.draw_without_rendering()
    return axes


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_norms_with_marks():
    axes = drawn(panels.norms_over_steps, columns(NORMS))
    assert axes.get_yscale() == "log"
    assert legend(axes) == ["norm before clipping", "threshold 1", "clipped (2)", "skipped (1)", "not finite (2)"]
    assert axes.get_xlim() == (0.5, 6.5)


def test_a_threshold_that_moves_or_is_none():
    moving = Columns.of([Step(1, 1.0, 1.0), Step(2, 1.0, 2.0)])
    assert legend(drawn(panels.norms_over_steps, moving))[1] == "threshold"
    assert legend(drawn(panels.norms_over_steps, columns([1.0], math.inf)))[1] == "no threshold"


def test_the_share_is_of_each_part():
    axes = drawn(panels.share_clipped, columns([0.5] * 60 + [2.0] * 60))
    values = axes.patches[0].get_data().values
    assert (len(values), values[0], values[-1]) == (60, 0.0, 1.0)


def test_the_histogram_counts_every_positive_norm():
    axes = drawn(panels.histogram, columns(NORMS))
    assert sum(bar.get_height() for bar in axes.patches) == 3
    assert legend(axes) == ["50%: 2", "90%: 2.8", "99%: 2.98", "threshold 1"]


def test_the_histogram_shows_what_was_clipped_not_what_the_last_threshold_would_clip():
    steps = [Step(i, 2.0, 4.0) for i in range(1, 6)]
    steps += [Step(6, 9.0, 4.0), Step(7, 90.0, 4.0, skipped=True), Step(8, 0.5, 1.0)]
    axes = drawn(panels.histogram, Columns.of(steps))
    colours = panels.Palette()
    heights = dict.fromkeys((colours.norm, colours.clipped, colours.skipped), 0)
    for bar in axes.patches:
        heights[to_hex(bar.get_facecolor())] += bar.get_height()
    assert heights == {colours.norm: 6, colours.clipped: 1, colours.skipped: 1}
    assert legend(axes)[-1] == "last threshold 1"


def test_few_steps_have_a_tick_each():
    for count in (1, 2, 3):
        axes = drawn(panels.norms_over_steps, columns([1.0] * count))
        ticks = [tick for tick in axes.get_xticks() if 0.5 <= tick <= count + 0.5]
        assert ticks == list(range(1, count + 1))
        assert axes.lines[0].get_marker() == ("." if count == 1 else "")


def test_a_dollar_in_a_name_is_a_letter():
    layers = Layers(("w$a$", "w$\\frac$"), np.array([2.0, 1.0], np.float32))
    axes = drawn(panels.layers_over_steps, LayerTable.of([Step(1, 1.0, 1.0, layers=layers)]))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["w$a$", "w$\\frac$"]


def test_layers_have_the_largest_first():
    layers = Layers(("m.small.w", "m.large.w"), np.array([1.0, 2.0], np.float32))
    table = LayerTable.of([Step(i, 1.0, 1.0, layers=layers) for i in (1, 2)])
    axes = drawn(panels.layers_over_steps, table)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["large", "small"]
    assert axes.images[0].get_array().shape == (2, 2)


@pytest.mark.parametrize("norms", [[], [math.nan], [0.0], [1.0], [5e-324, 1e308]])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, math.inf])
def test_what_cannot_be_drawn_is_no_error(norms, max_norm):
    given = columns(norms, max_norm)
    for panel in (panels.norms_over_steps, panels.share_clipped, panels.histogram):
        drawn(panel, given)


def test_layers_without_a_drawable_norm():
    for norms in ([math.nan, 0.0], [1.0, 1.0]):
        layers = Layers(("a", "b"), np.array(norms, np.float32))
        drawn(panels.layers_over_steps, LayerTable.of([Step(1, 1.0, 1.0, layers=layers)]))


def test_names_are_cut_to_what_tells_them_apart():
    assert panels.told_apart(["net.0.weight", "net.1.weight"]) == ["0", "1"]
    assert panels.told_apart(["net.0.weight", "net.0.bias"]) == ["weight", "bias"]
    assert panels.told_apart(["a", "b.c"]) == ["a", "b.c"]
    assert panels.told_apart(["a.b"]) == ["b"]
    assert panels.shortened("abcdefghij", 7) == "abc…hij"
    assert panels.shortened("abc", 7) == "abc"


def test_no_two_colours_are_alike():
    colours = list(vars(panels.Palette()).values())
    assert len(set(colours)) == len(colours)
