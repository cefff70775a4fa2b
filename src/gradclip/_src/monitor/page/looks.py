"""How panels look: colours, axes along the steps, ticks and legends."""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import blended_transform_factory

PLAIN = FuncFormatter(lambda value, _: f"{value:,.5g}")
ROUND = (1, 2, 2.5, 5, 10)  # steps between ticks


@dataclass(frozen=True)
class Palette:
    """Colours, all different, so a page can replace each of them by its own."""

    ink: str = "#1b1f24"
    muted: str = "#5c6470"
    grid: str = "#e3e6eb"
    norm: str = "#2f6fb1"
    clipped: str = "#cf6a0a"
    skipped: str = "#7a4fd0"
    nonfinite: str = "#c8202f"
    threshold: str = "#111418"


@dataclass(frozen=True)
class PanelStyle:
    """How to draw a panel: its colours, and how many points, letters and bars fit."""

    palette: Palette = Palette()
    points: int = 400
    letters: int = 26
    legend_columns: int = 5
    bars: int = 60


def positive(values: np.ndarray) -> np.ndarray:
    """Return values for a log scale: NaN for those it cannot show, the rest limited to a range it can."""
    return np.where(np.isfinite(values) & (values > 0), np.clip(values.astype(np.float64), 1e-200, 1e200), np.nan)


def usual_range(norms: np.ndarray) -> tuple[float, float]:
    """Return the smallest and largest of the usual norms, of finite norms above 0.

    That is from the 10th to the 90th percentile, and beyond these by a factor of 3, or by the square of the factor
    between the percentile and the median, as far as there are norms.
    """
    low = float(np.percentile(norms, 10, method="higher"))
    high = float(np.percentile(norms, 90, method="lower"))
    middle = float(np.percentile(norms, 50, method="lower"))
    low, high = min(low, middle), max(high, middle)
    return max(norms.min(), low / max(3, (middle / low) ** 2)), min(norms.max(), high * max(3, (high / middle) ** 2))


def along_steps(axes: Axes, steps: np.ndarray, look: PanelStyle) -> None:
    """Give the axes the steps of the run, as all panels of steps have them."""
    if len(steps):
        axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=ROUND, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    style(axes, look)


def style(axes: Axes, look: PanelStyle) -> None:
    """Give the axes a grid, two spines and labels in the colours of the palette."""
    colours = look.palette
    axes.grid(color=colours.grid, lw=0.7)
    axes.set_axisbelow(True)
    axes.patch.set_visible(False)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(colours.muted)
    axes.tick_params(which="both", colors=colours.muted, labelsize=9)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            ticks(axis, *axis.get_view_interval())
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set_color(colours.ink)


def ticks(axis: Axis, low: float, high: float) -> None:
    """Label a log axis in plain numbers. A short one has more than the powers of ten."""
    if high < 10 * low:
        axis.set_major_locator(MaxNLocator(4, steps=ROUND))
    elif high < 100 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(PLAIN)
    axis.set_minor_formatter(NullFormatter())


def legend(axes: Axes, look: PanelStyle) -> None:
    """Put the legend above the axes, so it hides nothing, and at the left of the figure, so it is not cut off."""
    shown = axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.01, 1.01),
        bbox_transform=blended_transform_factory(axes.figure.transFigure, axes.transAxes),
        ncols=look.legend_columns,
        frameon=False,
        fontsize=9,
        borderaxespad=0.2,
    )
    for text in shown.get_texts():
        text.set_color(look.palette.ink)
