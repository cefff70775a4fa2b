"""Panels in axes: what is drawn, of ordinary runs and of those with nothing to draw."""

import math

import numpy as np
import pytest

from drawn_panels import NORMS, columns, drawn, legend
from gradclip._src.monitor.page import panels
from gradclip._src.monitor.records import Columns, Step


def test_norms_with_marks():
    axes = drawn(panels.norms_over_steps, columns(NORMS))
    assert axes.get_yscale() == "log"
    assert legend(axes) == ["norm", "threshold 1", "clipped (2)", "skipped (1)", "not finite (2)"]
    assert axes.get_xlim() == (0.5, 6.5)


def test_a_threshold_that_moves_or_is_none():
    moving = Columns.of([Step(1, 1.0, 1.0), Step(2, 1.0, 2.0)])
    assert legend(drawn(panels.norms_over_steps, moving))[1] == "threshold"
    assert legend(drawn(panels.norms_over_steps, columns([1.0], math.inf)))[1] == "no threshold"


def test_one_mark_among_thousands_is_large_and_many_are_small():
    assert drawn(panels.norms_over_steps, columns([0.5] * 999 + [2.0])).lines[2].get_markersize() > 7
    assert drawn(panels.norms_over_steps, columns([2.0] * 1000)).lines[2].get_markersize() == 3


def test_the_share_is_of_each_part():
    axes = drawn(panels.clipped_share, columns([0.5] * 60 + [2.0] * 60))
    values, edges, _ = axes.patches[0].get_data()
    assert (len(values), values[0], values[-1]) == (60, 0.0, 1.0)
    assert (edges[0], edges[-1]) == axes.get_xlim() == (0.5, 120.5)


def test_the_share_of_one_step_fills_the_scale():
    axes = drawn(panels.clipped_share, columns([0.5] * 6000 + [2.0]))
    assert axes.get_ylim()[1] == pytest.approx(0.0104)
    assert axes.get_yticklabels()[1].get_text() == "0.5%"


def test_the_skipped_share_is_on_top_of_the_clipped_share():
    axes = drawn(panels.clipped_share, columns([2.0, math.inf]))
    clipped, skipped = (patch.get_data() for patch in axes.patches)
    assert (clipped.values.tolist(), skipped.values.tolist()) == ([1, 0], [1, 1])
    assert skipped.baseline.tolist() == [1, 0]


def test_losses():
    steps = [Step(i, 1.0, 1.0, loss=loss) for i, loss in enumerate([2.0, math.nan, 1.0], 1)]
    axes = drawn(panels.losses_over_steps, Columns.of(steps))
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), [2.0, math.nan, 1.0])
    assert (axes.get_yscale(), axes.get_xlim()) == ("log", (0.5, 3.5))
    steps.append(Step(4, 1.0, 1.0, loss=-1e300))
    axes = drawn(panels.losses_over_steps, Columns.of(steps))
    assert (axes.get_yscale(), axes.lines[0].get_ydata()[-1]) == ("linear", -1e200)


def test_few_steps_have_a_tick_each():
    for count in (1, 2, 3):
        axes = drawn(panels.norms_over_steps, columns([1.0] * count))
        ticks = [tick for tick in axes.get_xticks() if 0.5 <= tick <= count + 0.5]
        assert ticks == list(range(1, count + 1))
        assert axes.lines[0].get_marker() == ("." if count == 1 else "")


@pytest.mark.parametrize("norms", [[], [math.nan], [0.0], [1.0], [5e-324, 1e308]])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e300, math.inf])
def test_what_cannot_be_drawn_is_no_error(norms, max_norm):
    given = columns(norms, max_norm)
    for panel in (panels.norms_over_steps, panels.clipped_share):
        drawn(panel, given)
