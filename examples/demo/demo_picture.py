"""The picture of the sweep: test accuracy against learning rate, and the norms of one run. Readable at 400 pixels."""

import math
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator, PercentFormatter

from demo_results import KINDS, Sweep
from demo_training import Curves

# Colours that people with any colour vision can tell apart, and marks for those who see none.
_STYLES = {"none": ("#555555", "s"), "fixed": ("#D55E00", "^"), "adaptive": ("#0072B2", "o")}
_MOST_TICKS = 8
_INCHES, _PIXELS = (6.4, 7.8), 1200  # a point is 0.87 pixels on a screen of 400
_FONT = {
    "font.size": 17,
    "axes.titlesize": 18,
    "axes.titlelocation": "left",
    "xtick.labelsize": 15,
    "ytick.labelsize": 15,
}


def write_picture(sweep: Sweep, shown: Curves, path: Path) -> Path:
    """Draw the accuracies, and below them the norms of the first seed of the adaptive run `shown`. Save a PNG."""
    with matplotlib.rc_context(_FONT):
        figure = Figure(
            figsize=_INCHES,
            dpi=_PIXELS / _INCHES[0],
            layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
            facecolor="white",
        )
        FigureCanvasAgg(figure)
        upper, lower = figure.subplots(2, height_ratios=(1.35, 1))
        _draw_accuracies(upper, sweep)
        _draw_norms(lower, shown)
        lower.set_title(f"One adaptive run at rate {sweep.shown:g}")
        figure.savefig(path)
    return path


def _draw_accuracies(axis: Axes, sweep: Sweep) -> None:
    for kind in KINDS:
        colour, mark = _STYLES[kind]
        trained = sweep.of(kind)
        least, most = zip(*(one.spread for one in trained), strict=True)
        axis.fill_between(sweep.rates, least, most, color=colour, alpha=0.15, lw=0)
        medians = [one.median for one in trained]
        axis.plot(sweep.rates, medians, mark + "-", color=colour, lw=3, ms=9, label=sweep.names[kind])
    axis.set(xscale="log", ylim=(0, 1), xlabel="learning rate")
    axis.xaxis.set_minor_locator(NullLocator())
    named = sweep.rates[:: math.ceil(len(sweep.rates) / _MOST_TICKS)]
    axis.set_xticks(named, [f"{rate:g}" for rate in named])
    axis.yaxis.set_major_formatter(PercentFormatter(1))
    axis.grid(alpha=0.25)
    axis.set_title("Test accuracy, median and range")
    axis.legend(loc="lower left", framealpha=0.9)


def _draw_norms(axis: Axes, curves: Curves) -> None:
    norms, max_norms = _drawable(curves.norms[0]), _drawable(curves.max_norms[0])
    steps = np.arange(1, len(norms) + 1)
    axis.plot(steps, norms, ".", color="#999999", ms=4)
    axis.plot([], [], ".", color="#999999", ms=14, label="gradient norm")
    axis.plot(steps, max_norms, color=_STYLES["adaptive"][0], lw=3, label="threshold")
    axis.set(yscale="log", xlabel="training step", xlim=(0, len(norms) + 1))
    axis.margins(y=0.25)  # room for the legend
    axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.grid(alpha=0.25)
    axis.legend(loc="upper right", ncols=2, framealpha=0.9, columnspacing=1.0, handletextpad=0.5)


def _drawable(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)
