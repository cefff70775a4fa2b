"""The distribution of the norms: every norm is in a bar, and a spike does not squeeze the others."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_hex

from drawn_panels import NORMS, columns, drawn, legend
from gradclip._src.monitor.page.looks import Palette
from gradclip._src.monitor.page.panels import Bars, histogram
from gradclip._src.monitor.records import Columns, Step

USUAL = np.geomspace(0.8, 1.25, 200)


def test_the_histogram_counts_every_positive_norm():
    axes = drawn(histogram, columns(NORMS))
    assert sum(bar.get_height() for bar in axes.patches) == 3
    assert legend(axes) == ["50%: 2", "90%: 2.8", "99%: 2.98", "threshold 1"]


def test_a_bar_too_low_to_be_seen_has_a_mark():
    axes = drawn(histogram, columns([0.5] * 1000 + [446.0]))
    colours = [line.get_color() for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert colours == [Palette().clipped]


def test_the_histogram_shows_what_was_clipped_not_what_the_last_threshold_would_clip():
    steps = [Step(i, 2.0, 4.0) for i in range(1, 6)]
    steps += [Step(6, 9.0, 4.0), Step(7, 90.0, 4.0, skipped=True), Step(8, 0.5, 1.0)]
    axes = drawn(histogram, Columns.of(steps))
    colours = Palette()
    heights = dict.fromkeys((colours.norm, colours.clipped, colours.skipped), 0)
    for bar in axes.patches:
        heights[to_hex(bar.get_facecolor())] += bar.get_height()
    assert heights == {colours.norm: 6, colours.clipped: 1, colours.skipped: 1}
    assert legend(axes)[-1] == "last threshold 1"


def heights(axes):
    return np.array([bar.get_height() for bar in axes.patches])


@pytest.mark.parametrize(("spike", "said"), [(1e9, "last bar: 2 above 1.2"), (1e-9, "first bar: 2 below 0.7")])
def test_norms_far_from_all_others_are_collected_in_one_bar(spike, said):
    axes = drawn(histogram, columns([*USUAL, spike, 3 * spike], math.inf))
    assert heights(axes).sum() == 202
    assert (heights(axes) > 0).sum() > 30
    low, high = axes.get_xlim()
    assert high / low < 3
    assert axes.get_xlabel().startswith(f"norm before clipping (log scale)\n{said}")
    assert axes.get_xlabel().endswith("up to 3e+09" if spike > 1 else "down to 1e-09")


def test_both_ends_may_be_collected_and_lines_stay_inside():
    norms = [1e-200, *USUAL, *[1e30] * 5]
    axes = drawn(histogram, columns(norms, 1e50))
    assert heights(axes).sum() == len(norms)
    assert axes.get_xlabel().splitlines()[1:] == [
        "first bar: 1 below 0.776, down to 1e-200",
        "last bar: 5 above 1.29, up to 1e+30",
    ]
    assert legend(axes) == ["50%: 1", "90%: 1.21", "99%: 1e+30", "threshold 1e+50"]
    assert axes.get_xlim()[1] < 2


def test_norms_that_spread_widely_are_all_shown():
    for norms in (
        np.geomspace(1e-3, 1e3, 200),
        [*USUAL, 20.0, 0.05],
        np.exp(np.random.default_rng(0).normal(size=999)),
    ):
        bars = Bars.of(np.asarray(norms))
        assert (bars.below, bars.above) == (0, 0)
        assert bars.edges[0] < np.min(norms) < np.max(norms) < bars.edges[-1]


@pytest.mark.parametrize("norms", [[], [math.nan], [0.0], [1.0], [5e-324, 1e308], [1.0] * 99 + [1e308]])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e300, math.inf])
def test_what_cannot_be_drawn_is_no_error(norms, max_norm):
    drawn(histogram, columns(norms, max_norm))
