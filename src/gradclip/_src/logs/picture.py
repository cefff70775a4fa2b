"""The picture of a replay: the norms, and the threshold of each rule."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gradclip._src.logs.replay import Replayed
from gradclip._src.monitor.page.looks import PanelStyle, along_steps, envelope, legend, positive
from gradclip._src.monitor.page.tables import percent
from gradclip._src.monitor.records import Columns

_LINES = ("-", "--", "-.", ":")


def write(columns: Columns, replayed: Sequence[Replayed], path: Path) -> Path:
    """Draw the norms and all thresholds over the steps, and save them."""
    look = PanelStyle(legend_columns=3)
    figure = Figure(figsize=(11, 5.2), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_yscale("log")
    norms = positive(columns.norms)
    dot = "." if len(norms) == 1 else ""
    line = envelope(columns.steps, norms, look.points)
    axes.plot(*line, color=look.palette.grid, lw=0.9, marker=dot, label="norm before clipping", zorder=1)
    axes.lines[0].set_color("#9aa4b2")
    for place, one in enumerate(replayed):
        axes.plot(
            *envelope(columns.steps, np.where(np.isinf(one.max_norms), np.nan, one.max_norms), look.points),
            color=colormaps["viridis"](0.8 * place / max(1, len(replayed) - 1)),
            ls=_LINES[place % len(_LINES)],
            lw=1.6,
            label=f"{one.rule}: clips {percent(float(one.clipped.mean()))}",
        )
    axes.set_ylabel("norm (log scale)")
    along_steps(axes, columns.steps, look)
    legend(axes, look)
    figure.savefig(path)
    return path
