"""The panel with the distribution of the norms. One huge spike does not squeeze all others into one bar."""

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gradclip._src.monitor.looks import PLAIN, ROUND, PanelStyle, legend, positive, style, usual_range
from gradclip._src.monitor.records import Columns, percentiles

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
