"""The panel of layers: a map of their norms, with colours that a spike does not flatten."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.transforms import blended_transform_factory

from gradclip._src.monitor.looks import PanelStyle, along_steps, positive, ticks, usual_range
from gradclip._src.monitor.points import columns_of, span_of
from gradclip._src.monitor.records import LayerTable, Overview, printable
from gradclip._src.monitor.trend import spikes_in

_FAR = "#d6246e"  # in light and in dark: a norm beyond the colours


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


def layers_over_steps(axes: Axes, drawn: LayerMap, steps: np.ndarray, look: PanelStyle, most: int = 16) -> None:
    """Draw a heat map of the norms of the largest layers and of those with spikes, with a colour bar above it."""
    table, sampled, missed = drawn
    top = table.shown(most, sampled=sampled)
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
