"""The panels of the picture, each drawn into matplotlib axes in the colours of a palette.

Long runs are reduced to the number of points in a picture, keeping the extremes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter
from matplotlib.transforms import blended_transform_factory

from gradclip.monitor.records import Columns, LayerTable, percentiles, printable

_PLAIN = FuncFormatter(lambda value, _: f"{value:,.0f}" if 1 <= value < 1e5 else f"{value:g}")


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
class Look:
    """How to draw a panel: its colours, and how many points and letters fit."""

    palette: Palette = Palette()
    points: int = 400
    letters: int = 34
    legend_columns: int = 5


def norms_over_steps(axes: Axes, columns: Columns, look: Look) -> None:
    """Draw the norm before clipping over steps, the threshold, and a mark for each clipped, skipped or bad step."""
    colours, above = look.palette, blended_transform_factory(axes.transData, axes.transAxes)
    norms, steps = _positive(columns.norms), columns.steps
    axes.set_yscale("log")
    dot = "." if len(steps) == 1 else ""  # a line needs two steps
    line = envelope(steps, norms, look.points)
    axes.plot(*line, color=colours.norm, lw=0.9, marker=dot, label="norm before clipping")
    axes.plot(
        *envelope(steps, _positive(columns.max_norms), look.points),
        color=colours.threshold,
        lw=1.3,
        ls="--",
        drawstyle="steps-mid",
        label=_threshold_label(columns),
    )
    for what, colour, marker, chosen in (
        ("clipped", colours.clipped, ".", columns.clipped),
        ("skipped", colours.skipped, "v", columns.skipped),
        ("not finite", colours.nonfinite, "x", ~columns.finite),
    ):
        if chosen.any():
            at = largest(norms, chosen, look.points)
            high = np.isnan(norms[at])
            style = {"color": colour, "marker": marker, "ls": "none", "ms": 4 if marker == "." else 6}
            axes.plot(steps[at[~high]], norms[at[~high]], **style, label=f"{what} ({chosen.sum():,})", zorder=3)
            height = 0.92 if what == "skipped" else 0.97
            axes.plot(steps[at[high]], np.full(high.sum(), height), transform=above, **style, zorder=3)
    _finish(axes, columns.steps, look)
    axes.set_ylabel("norm (log scale)")
    _legend(axes, look)


def share_clipped(axes: Axes, columns: Columns, look: Look) -> None:
    """Draw the share of steps clipped in each part of the run."""
    parts = bins_of(len(columns.steps), min(60, look.points))
    shares = [columns.clipped[part].mean() for part in parts]
    edges = [columns.steps[part.start] for part in parts] + [columns.steps[-1] + 1 if len(columns.steps) else 1]
    if shares:
        axes.stairs(shares, edges, fill=True, color=look.palette.clipped, alpha=0.75)
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylabel("steps clipped")
    _finish(axes, columns.steps, look)


def histogram(axes: Axes, columns: Columns, look: Look) -> None:
    """Draw a histogram of the norms by outcome, with the last threshold and percentiles."""
    colours, threshold = look.palette, float(columns.max_norms[-1]) if len(columns.max_norms) else np.inf
    norms = _positive(columns.norms)
    axes.set_xscale("log")
    if np.isfinite(norms).any():
        low, high = np.nanmin(norms) * 0.97, np.nanmax(norms) * 1.03
        edges, below = np.geomspace(low, high, 51), np.zeros(50)
        for colour, chosen in (
            (colours.norm, ~(columns.clipped | columns.skipped)),
            (colours.clipped, columns.clipped),
            (colours.skipped, columns.skipped),
        ):
            counts, _ = np.histogram(norms[chosen & np.isfinite(norms)], edges)
            if counts.any():
                axes.bar(edges[:-1], counts, np.diff(edges), below, align="edge", color=colour, linewidth=0)
            below += counts
        for which, style in ((50, "-"), (90, "-."), (99, ":")):
            value = percentiles(norms, (which,))[which]
            axes.axvline(value, color=colours.ink, lw=1.1, ls=style, label=f"{which}%: {value:.3g}")
    if 0 < threshold < np.inf:
        label = f"{'' if (columns.max_norms == threshold).all() else 'last '}threshold {threshold:.3g}"
        axes.axvline(threshold, color=colours.threshold, lw=1.5, ls="--", label=label)
    axes.set_xlabel("norm before clipping (log scale)")
    axes.set_ylabel("steps")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    _style(axes, look)
    if axes.get_legend_handles_labels()[0]:
        _legend(axes, look)


def layers_over_steps(axes: Axes, table: LayerTable, look: Look, most: int = 16) -> None:
    """Draw a heat map of the norms of the largest layers over steps, with a colour bar."""
    top = table.top(most)
    norms = columns_of(_positive(top.norms).T, top.steps, look.points)
    finite = norms[np.isfinite(norms)]
    low, high = (finite.min(), finite.max()) if finite.size else (1.0, 1.0)
    scale = LogNorm(low, high if high > low else low * 1.1)
    start = top.steps.min() - 0.5
    extent = (start, start + span_of(top.steps)[0], len(top.names) - 0.5, -0.5)
    drawn = axes.imshow(norms, norm=scale, aspect="auto", interpolation="nearest", cmap="viridis", extent=extent)
    names = [shortened(printable(name), look.letters) for name in told_apart(top.names)]
    axes.set_yticks(range(len(top.names)), names, parse_math=False)  # a dollar sign is not math here
    _along_steps(axes, look)
    axes.grid(False)
    bar = axes.figure.colorbar(drawn, ax=axes, pad=0.02, aspect=30)
    bar.outline.set_visible(False)
    bar.ax.tick_params(which="both", colors=look.palette.muted, labelsize=8)
    bar.ax.yaxis.set_major_formatter(_PLAIN)
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.set_label("norm", color=look.palette.ink)


def told_apart(names: Sequence[str]) -> list[str]:
    """Return names without the dotted parts that all names share at the start or at the end."""
    parts = [name.split(".") for name in names]
    most = min(map(len, parts)) - 1
    first = next((i for i in range(most) if len({one[i] for one in parts}) > 1), most)
    last = next((i for i in range(most - first) if len({one[-1 - i] for one in parts}) > 1), most - first)
    return [".".join(one[first : len(one) - last]) for one in parts]


def shortened(name: str, letters: int) -> str:
    """Return a name; if it is too long, leave out the middle."""
    if len(name) <= letters:
        return name
    return f"{name[: (letters - 1) // 2]}…{name[-(letters // 2) :]}"


def _threshold_label(columns: Columns) -> str:
    finite = columns.max_norms[np.isfinite(columns.max_norms)]
    if not finite.size:
        return "no threshold"
    return f"threshold {finite[-1]:.3g}" if (finite == finite[-1]).all() else "threshold"


def _positive(values: np.ndarray) -> np.ndarray:
    """Return values for a log scale: NaN for those it cannot show, the rest limited to a range it can."""
    return np.where(np.isfinite(values) & (values > 0), np.clip(values.astype(np.float64), 1e-200, 1e200), np.nan)


def _finish(axes: Axes, steps: np.ndarray, look: Look) -> None:
    if len(steps):
        axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    _along_steps(axes, look)


def _along_steps(axes: Axes, look: Look) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _style(axes, look)


def _style(axes: Axes, look: Look) -> None:
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
            axis.set_major_formatter(_PLAIN)
            axis.set_minor_formatter(NullFormatter())
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set_color(colours.ink)


def _legend(axes: Axes, look: Look) -> None:
    """Put the legend above the axes, so it hides nothing."""
    where: Sequence[float] = (0.0, 1.01)
    shown = axes.legend(
        loc="lower left", bbox_to_anchor=where, ncols=look.legend_columns, frameon=False, fontsize=9, borderaxespad=0.2
    )
    for text in shown.get_texts():
        text.set_color(look.palette.ink)


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


def span_of(steps: np.ndarray) -> tuple[int, int]:
    """Return how many steps the run covers, and the smallest gap between two steps. The last step adds one gap."""
    gap = max(1, int(np.diff(steps).min())) if len(steps) > 1 else 1
    return int(np.ptp(steps)) + gap, gap


def columns_of(table: np.ndarray, steps: np.ndarray, most: int) -> np.ndarray:
    """Reduce a table (rows, steps) to at most `most` columns of equal width, placed by step number.

    Each column holds the largest value of its part, or NaN if all are NaN. A part without steps repeats the one before.
    """
    span, gap = span_of(steps)
    count = min(most, span // gap)
    places = (steps - steps.min()) * count // span
    joined = np.full((count, len(table)), -np.inf)
    np.maximum.at(joined, places, np.where(np.isnan(table), -np.inf, table).T)
    held = np.zeros(count, int)
    held[places] = places
    return np.where(joined == -np.inf, np.nan, joined)[np.maximum.accumulate(held)].T
