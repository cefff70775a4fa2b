"""How panels look: colours, axes along the steps, ticks and legends, and long runs reduced to a picture's points."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import blended_transform_factory


def bins_of(count: int, most: int) -> list[slice]:
    """Return slices that cut `count` entries into at most `most` parts of nearly equal length."""
    edges = np.linspace(0, count, min(count, most) + 1).round().astype(int).tolist()
    return [slice(start, end) for start, end in pairwise(edges)]


def envelope(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a line through the smallest and largest y of each part, in order; NaN if all of a part are NaN."""
    if len(x) <= 2 * most:
        return x, y
    places: list[int] = []
    for part in bins_of(len(x), most):
        values = y[part]
        if np.isnan(values).all():
            places.append(part.start)
        else:
            places += sorted({part.start + int(np.nanargmin(values)), part.start + int(np.nanargmax(values))})
    return x[places], y[places]


def largest(y: np.ndarray, chosen: np.ndarray, most: int) -> np.ndarray:
    """Return the indices of chosen entries: all of them if few, else the largest in each part."""
    if chosen.sum() <= most:
        return np.flatnonzero(chosen)
    found = []
    for part in bins_of(len(y), most):
        inside = np.flatnonzero(chosen[part])
        if inside.size:
            values = np.where(np.isnan(y[part][inside]), -np.inf, y[part][inside])
            found.append(part.start + int(inside[values.argmax()]))
    return np.array(found, int)


def span_of(steps: np.ndarray, sampled: np.ndarray | None = None) -> tuple[int, int]:
    """Return how many steps the run covers, and the smallest gap between two of those sampled, by default all.

    The last step adds one gap.
    """
    usual = steps if sampled is None else steps[sampled]
    gap = max(1, int(np.diff(usual).min())) if len(usual) > 1 else 1
    return int(np.ptp(steps)) + gap, gap


def columns_of(table: np.ndarray, steps: np.ndarray, most: int, sampled: np.ndarray | None = None) -> np.ndarray:
    """Reduce a table (rows, steps) to at most `most` columns of equal width, placed by step number.

    Each column holds the largest value of its part, or NaN if all are NaN. A part without steps repeats the one before.
    A step that is not `sampled` counts for its own part only, and makes the columns no narrower.
    """
    usual = np.ones(len(steps), bool) if sampled is None else sampled
    span, gap = span_of(steps, usual)
    count = max(1, min(most, span // gap))
    places = (steps - steps.min()) * count // span
    held = np.zeros(count, int)
    held[places[usual]] = places[usual]
    repeated = _largest_of(table.T[usual], places[usual], count)[np.maximum.accumulate(held)]
    joined = np.maximum(repeated, _largest_of(table.T[~usual], places[~usual], count))
    return np.where(joined == -np.inf, np.nan, joined).T


def _largest_of(rows: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    """Return the largest rows at each place; minus infinity without any."""
    joined = np.full((count, rows.shape[1]), -np.inf)
    np.maximum.at(joined, places, np.where(np.isnan(rows), -np.inf, rows))
    return joined


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
