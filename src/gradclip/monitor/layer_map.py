"""The panel of layers: a map of their norms, with colours that a spike does not flatten."""

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from gradclip.monitor.looks import Look, along_steps, positive, ticks
from gradclip.monitor.points import columns_of, span_of
from gradclip.monitor.records import LayerTable, printable

_FAR = "#d6246e"  # in light and in dark: a norm beyond the colours


def layers_over_steps(axes: Axes, table: LayerTable, steps: np.ndarray, look: Look, most: int = 16) -> None:
    """Draw a heat map of the norms of the largest layers and of those with spikes, with a colour bar above it."""
    top = table.shown(most)
    norms = columns_of(positive(top.norms).T, top.steps, look.points)
    low, high = colour_range(norms)
    start, span = top.steps.min() - 0.5, span_of(top.steps)[0]
    extent = (start, start + span, len(top.names) - 0.5, -0.5)
    colours, scale = colormaps["viridis"].with_extremes(over=_FAR), LogNorm(low, high)
    drawn = axes.imshow(norms, norm=scale, aspect="auto", interpolation="nearest", cmap=colours, extent=extent)
    rows, columns = np.nonzero(norms > high)
    if len(rows) <= look.bars:  # a column alone may be too narrow to be seen
        axes.plot(start + (columns + 0.5) * span / norms.shape[1], rows, color=_FAR, marker="o", ls="none", ms=5)
    names = [shortened(printable(name), look.letters) for name in told_apart(top.names)]
    axes.set_yticks(range(len(top.names)), names, parse_math=False)  # a dollar sign is not math here
    along_steps(axes, steps, look)
    axes.grid(False)
    bar = axes.figure.colorbar(
        drawn, ax=axes, location="top", pad=0.03, aspect=50, extend="max" if len(rows) else "neither"
    )
    bar.outline.set_visible(False)
    bar.ax.tick_params(which="both", colors=look.palette.muted, labelsize=8)
    ticks(bar.ax.xaxis, low, high)
    bar.set_label("norm", color=look.palette.ink)


def colour_range(norms: np.ndarray) -> tuple[float, float]:
    """Return the smallest and largest norm (layers, columns) to tell apart by colours.

    They cover the norms of each layer from its 10th to its 90th percentile, and beyond these by a factor of 3, or by
    the square of the factor between the percentile and the median. So a spike does not flatten all other colours.
    """
    layers = [layer[np.isfinite(layer)] for layer in norms]
    layers = [layer for layer in layers if layer.size]
    if not layers:
        return 1.0, 1.1
    ranges = [_usual(layer) for layer in layers]
    low, high = min(one[0] for one in ranges), max(one[1] for one in ranges)
    return low, max(high, 1.1 * low)


def _usual(norms: np.ndarray) -> tuple[float, float]:
    """Return the range of the usual norms of a layer."""
    low = float(np.percentile(norms, 10, method="higher"))
    high = float(np.percentile(norms, 90, method="lower"))
    middle = float(np.percentile(norms, 50, method="lower"))
    low, high = min(low, middle), max(high, middle)
    return max(norms.min(), low / max(3, (middle / low) ** 2)), min(norms.max(), high * max(3, (high / middle) ** 2))


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
