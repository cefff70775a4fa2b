"""Norms to draw, a panel drawn in axes, and what its legend says."""

import math

import numpy as np
from matplotlib.figure import Figure

from gradclip._src.monitor.page.looks import PanelStyle
from gradclip._src.monitor.records import Columns, Step

NORMS = [0.5, 2.0, math.nan, 3.0, math.inf, 0.0]


def columns(norms, max_norm=1.0):
    return Columns.of(
        [Step(i, float(x), max_norm, skipped=bool(np.isinf(x))) for i, x in enumerate(norms, 1)],
    )


def drawn(panel, *given):
    figure = Figure()
    axes = figure.add_subplot()
    panel(axes, *given, PanelStyle())
    figure.draw_without_rendering()
    return axes


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]
