"""The panels of the picture, each drawn into matplotlib axes in the colours of a palette."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import blended_transform_factory

from gradclip._src.monitor.page.looks import (
    PLAIN,
    ROUND,
    PanelStyle,
    along_steps,
    bins_of,
    columns_of,
    envelope,
    largest,
    legend,
    positive,
    span_of,
    style,
    ticks,
    usual_range,
)
from gradclip._src.monitor.records import Columns, LayerTable, Overview, percentiles
from gradclip._src.monitor.trend import spikes_in
from gradclip._src.words import printable

_FAR = "#d6246e"  # in light and in dark: a norm beyond the colours
_MOST_LAYERS = 16


class LayerMap(NamedTuple):
    """What the map shows: layer norms by step, which of them are sampled, and spikes whose layers were not measured.

    Rows that are not sampled are those of spikes, which a monitor measures beside the steps it samples.
    """

    table: LayerTable
    sampled: np.ndarray
    missed: np.ndarray

    @classmethod
    def of(cls, shown: Overview) -> "LayerMap | None":
        """Collect it; None if no step recorded layers."""
        if shown.layers is None:
            return None
        of_spikes, columns = shown.layers_of_spikes, shown.columns.of_finite_positive()
        table = LayerTable.of(
            step if step.layers else step._replace(layers=of_spikes.get(step.step)) for step in shown.records
        )
        assert table is not None  # it has at least the rows of `shown.layers`
        spikes = columns.steps[spikes_in(columns.norms)[0]]
        return cls(table, np.isin(table.steps, shown.layers.steps), spikes[~np.isin(spikes, table.steps)])


def layers_over_steps(axes: Axes, drawn: LayerMap, steps: np.ndarray, look: PanelStyle) -> None:
    """Draw a heat map of the norms of the largest layers and of those with spikes, with a colour bar above it."""
    table, sampled, missed = drawn
    top = table.shown(_MOST_LAYERS, sampled=sampled)
    norms = columns_of(positive(top.norms).T, top.steps, look.points, sampled)
    low, high = colour_range(columns_of(positive(top.norms[sampled]).T, top.steps[sampled], look.points))
    start, span = top.steps.min() - 0.5, span_of(top.steps, sampled)[0]
    extent = (start, start + span, len(top.names) - 0.5, -0.5)
    colours, scale = colormaps["viridis"].with_extremes(over=_FAR), LogNorm(low, high)
    image = axes.imshow(norms, norm=scale, aspect="auto", interpolation="nearest", cmap=colours, extent=extent)
    rows, columns = np.nonzero(norms > high)
    if len(rows) <= look.bars:  # a column alone may be too narrow to be seen
        axes.plot(start + (columns + 0.5) * span / norms.shape[1], rows, color=_FAR, marker="o", ls="none", ms=5)
    names = [shortened(printable(name), look.letters) for name in told_apart(top.names)]
    axes.set_yticks(range(len(top.names)), names, parse_math=False)  # a dollar sign is not math here
    along_steps(axes, steps, look)
    axes.grid(False)
    if len(missed):
        _mark_missed(axes, missed, look)
    bar = axes.figure.colorbar(
        image, ax=axes, location="top", pad=0.03, aspect=50, extend="max" if len(rows) else "neither"
    )
    bar.outline.set_visible(False)
    bar.ax.tick_params(which="both", colors=look.palette.muted, labelsize=8)
    ticks(bar.ax.xaxis, low, high)
    bar.set_label("norm", color=look.palette.ink)


def _mark_missed(axes: Axes, missed: np.ndarray, look: PanelStyle) -> None:
    """Mark the spikes whose layers were not measured at the lower edge, and say so below it."""
    some = missed[:: -(-len(missed) // look.points)]
    below = blended_transform_factory(axes.transData, axes.transAxes)
    marks = {"marker": "^", "ls": "none", "ms": 7, "mfc": "none", "mec": _FAR, "mew": 1.6, "clip_on": False}
    axes.plot(some, np.zeros(len(some)), transform=below, zorder=3, **marks)
    count = f"{len(missed):,} spikes were" if len(missed) > 1 else "a spike was"
    axes.set_xlabel(f"step (\N{WHITE UP-POINTING TRIANGLE} {count} not measured)")


def colour_range(norms: np.ndarray) -> tuple[float, float]:
    """Return the smallest and largest norm (layers, columns) to tell apart by colours.

    They cover the norms of each layer from its 10th to its 90th percentile, and beyond these by a factor of 3, or by
    the square of the factor between the percentile and the median. So a spike does not flatten all other colours.
    """
    layers = [layer[np.isfinite(layer)] for layer in norms]
    layers = [layer for layer in layers if layer.size]
    if not layers:
        return 1.0, 1.1
    ranges = [usual_range(layer) for layer in layers]
    low, high = min(one[0] for one in ranges), max(one[1] for one in ranges)
    return low, max(high, 1.1 * low)


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


_LONGER = 2.0  # times the usual range, in decades: what is farther away is collected in one bar
_LEAST = 10.0  # times: a range that is always shown


class Bars(NamedTuple):
    """The edges of the bars, and how many norms each end bar collects that lie beyond them."""

    edges: np.ndarray
    below: int = 0
    above: int = 0

    @classmethod
    def of(cls, norms: np.ndarray) -> "Bars":
        """Return bars for finite positive norms: for all of them, unless a few would squeeze the others."""
        low, high = usual_range(norms)
        first, last = float(norms.min()), float(norms.max())
        longest = _LONGER * max(np.log(high) - np.log(low), np.log(_LEAST))
        most, least = np.log(low) + longest, np.log(high) - longest
        low, high = first if np.log(first) >= least else low, last if np.log(last) <= most else high
        below, above = int((norms < low).sum()), int((norms > high).sum())
        low, high = float(norms[norms >= low].min()), float(norms[norms <= high].max())
        count = int(np.clip(3 * np.sqrt(norms.size), 5, 50))
        edges = np.geomspace(low * 0.97, high * 1.03, count + 1)
        ratio = edges[1] / edges[0]
        start, end = [edges[0] / ratio] * (below > 0), [edges[-1] * ratio] * (above > 0)
        return cls(np.array([*start, *edges, *end]), below, above)

    def inside(self, norms: np.ndarray | float) -> np.ndarray:
        """Move norms that lie beyond the edges into the end bars."""
        low, high = np.sqrt(self.edges[[0, -2]]) * np.sqrt(self.edges[[1, -1]])
        return np.clip(norms, low, high)

    def collected(self, norms: np.ndarray) -> str:
        """Say what the end bars hold."""
        told = []
        if self.below:
            told.append(f"first bar: {self.below:,} below {self.edges[1]:.3g}, down to {norms.min():.3g}")
        if self.above:
            told.append(f"last bar: {self.above:,} above {self.edges[-2]:.3g}, up to {norms.max():.3g}")
        return "".join(f"\n{one}" for one in told)


def histogram(axes: Axes, columns: Columns, look: PanelStyle) -> None:
    """Draw a histogram of the norms by outcome, with the last threshold and percentiles."""
    colours, threshold = look.palette, float(columns.max_norms[-1]) if len(columns.max_norms) else np.inf
    norms = positive(columns.norms)
    finite, label = norms[np.isfinite(norms)], "norm before clipping (log scale)"
    axes.set_xscale("log")
    if finite.size:
        bars = Bars.of(finite)
        _bars(axes, norms, bars, columns, look)
        for which, line in ((50, "-"), (90, "-."), (99, ":")):
            value = percentiles(norms, (which,))[which]
            axes.axvline(bars.inside(value), color=colours.ink, lw=1.1, ls=line, label=f"{which}%: {value:.3g}")
        label += bars.collected(finite)
        if 0 < threshold < np.inf:
            of_last = f"{'' if (columns.max_norms == threshold).all() else 'last '}threshold {threshold:.3g}"
            place = bars.inside(positive(columns.max_norms)[-1])
            axes.axvline(place, color=colours.threshold, lw=1.5, ls="--", label=of_last)
    axes.set_xlabel(label)
    axes.set_ylabel("steps")
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=ROUND, integer=True))
    axes.yaxis.set_major_formatter(PLAIN)
    style(axes, look)
    if axes.get_legend_handles_labels()[0]:
        legend(axes, look)


def _bars(axes: Axes, norms: np.ndarray, bars: Bars, columns: Columns, look: PanelStyle) -> None:
    """Draw the bars, and a mark on each part of a bar that is too low to be seen."""
    colours, edges = look.palette, bars.edges
    placed, below = bars.inside(norms), np.zeros(len(edges) - 1)
    tallest = np.histogram(placed[np.isfinite(placed)], edges)[0].max()
    for colour, chosen in (
        (colours.norm, ~(columns.clipped | columns.skipped)),
        (colours.clipped, columns.clipped),
        (colours.skipped, columns.skipped),
    ):
        counts, _ = np.histogram(placed[chosen & np.isfinite(placed)], edges)
        if counts.any():
            axes.bar(edges[:-1], counts, np.diff(edges), below, align="edge", color=colour, linewidth=0)
        below += counts
        low = (counts > 0) & (below < tallest / 60)
        middles = np.sqrt(edges[1:][low]) * np.sqrt(edges[:-1][low])
        axes.plot(middles, below[low], color=colour, marker="o", ls="none", ms=5, clip_on=False, zorder=3)


def norms_over_steps(axes: Axes, columns: Columns, look: PanelStyle) -> None:
    """Draw the norm before clipping over steps, the threshold, and a mark for each clipped, skipped or bad step."""
    colours, above = look.palette, blended_transform_factory(axes.transData, axes.transAxes)
    norms, steps = positive(columns.norms), columns.steps
    axes.set_yscale("log")
    dot = "." if len(steps) == 1 else ""  # a line needs two steps
    line = envelope(steps, norms, look.points)
    axes.plot(*line, color=colours.norm, lw=0.9, marker=dot, label="norm")
    axes.plot(
        *envelope(steps, positive(columns.max_norms), look.points),
        color=colours.threshold,
        lw=1.3,
        ls="--",
        drawstyle="steps-mid",
        label=_threshold_label(columns),
    )
    for what, colour, marker, chosen in (
        ("clipped", colours.clipped, "o", columns.clipped),
        ("skipped", colours.skipped, "v", columns.skipped),
        ("not finite", colours.nonfinite, "x", ~columns.finite),
    ):
        if chosen.any():
            at = largest(norms, chosen, look.points)
            high = np.isnan(norms[at])
            marks = {
                "color": colour,
                "marker": marker,
                "ls": "none",
                "ms": _size(len(at)),
                "mew": 1.8 if marker == "x" else 0,
            }
            axes.plot(steps[at[~high]], norms[at[~high]], **marks, label=f"{what} ({chosen.sum():,})", zorder=3)
            height = 0.92 if what == "skipped" else 0.97
            axes.plot(steps[at[high]], np.full(high.sum(), height), transform=above, **marks, zorder=3)
    axes.set_ylabel("norm (log scale)")
    along_steps(axes, steps, look)
    legend(axes, look)


def losses_over_steps(axes: Axes, columns: Columns, look: PanelStyle) -> None:
    """Draw the recorded losses over steps, on a log scale if all are above 0."""
    losses, recorded = columns.losses, np.isfinite(columns.losses)
    logarithmic = bool((losses[recorded] > 0).all())
    axes.set_yscale("log" if logarithmic else "linear")
    shown = positive(losses) if logarithmic else np.where(recorded, losses.clip(-1e200, 1e200), np.nan)
    marker = "o" if recorded.sum() == 1 else ""
    axes.plot(*envelope(columns.steps, shown, look.points), color=look.palette.norm, lw=0.9, marker=marker, ms=4)
    axes.set_ylabel("loss (log scale)" if logarithmic else "loss")
    along_steps(axes, columns.steps, look)


def clipped_share(axes: Axes, columns: Columns, look: PanelStyle) -> None:
    """Draw the share of steps clipped in each part of the run, and on top of it the share skipped."""
    colours, steps = look.palette, columns.steps
    parts = bins_of(len(steps), look.bars)
    edges = np.array([*(steps[part.start] for part in parts), *(steps[-1:] + 1)]) - 0.5
    below = np.zeros(len(parts))
    for chosen, colour in ((columns.clipped, colours.clipped), (columns.skipped, colours.skipped)):
        above = below + [chosen[part].mean() for part in parts]
        if chosen.any():
            axes.stairs(above, edges, baseline=below, fill=True, color=colour)
        below = above
    axes.set_ylim(0, 1.04 * below.max() if below.any() else 1.04)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=ROUND))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    axes.set_ylabel("share of steps")
    along_steps(axes, steps, look)


def _threshold_label(columns: Columns) -> str:
    finite = columns.max_norms[np.isfinite(columns.max_norms)]
    if not finite.size:
        return "no threshold"
    return f"threshold {finite[-1]:.3g}" if (finite == finite[-1]).all() else "threshold"


def _size(marks: int) -> float:
    """Return how large marks are, in points: one among thousands of steps is seen, and many leave the line visible."""
    return max(3.0, 8.0 - 0.06 * marks)
