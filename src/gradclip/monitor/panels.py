"""The panels of the picture, each drawn into matplotlib axes in the colours of a palette."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import blended_transform_factory

from gradclip.monitor.looks import PLAIN, ROUND, Look, along_steps, legend, positive, style
from gradclip.monitor.points import bins_of, envelope, largest
from gradclip.monitor.records import Columns, percentiles


def norms_over_steps(axes: Axes, columns: Columns, look: Look) -> None:
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


def losses_over_steps(axes: Axes, columns: Columns, look: Look) -> None:
    """Draw the recorded losses over steps, on a log scale if all are above 0."""
    losses, recorded = columns.losses, np.isfinite(columns.losses)
    logarithmic = bool((losses[recorded] > 0).all())
    axes.set_yscale("log" if logarithmic else "linear")
    shown = positive(losses) if logarithmic else np.where(recorded, losses.clip(-1e200, 1e200), np.nan)
    marker = "o" if recorded.sum() == 1 else ""
    axes.plot(*envelope(columns.steps, shown, look.points), color=look.palette.norm, lw=0.9, marker=marker, ms=4)
    axes.set_ylabel("loss (log scale)" if logarithmic else "loss")
    along_steps(axes, columns.steps, look)


def share_clipped(axes: Axes, columns: Columns, look: Look) -> None:
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


def histogram(axes: Axes, columns: Columns, look: Look) -> None:
    """Draw a histogram of the norms by outcome, with the last threshold and percentiles."""
    colours, threshold = look.palette, float(columns.max_norms[-1]) if len(columns.max_norms) else np.inf
    norms = positive(columns.norms)
    axes.set_xscale("log")
    if np.isfinite(norms).any():
        _bars(axes, norms, columns, look)
        for which, line in ((50, "-"), (90, "-."), (99, ":")):
            value = percentiles(norms, (which,))[which]
            axes.axvline(value, color=colours.ink, lw=1.1, ls=line, label=f"{which}%: {value:.3g}")
    if 0 < threshold < np.inf and np.isfinite(norms).any():
        label = f"{'' if (columns.max_norms == threshold).all() else 'last '}threshold {threshold:.3g}"
        axes.axvline(positive(columns.max_norms)[-1], color=colours.threshold, lw=1.5, ls="--", label=label)
    axes.set_xlabel("norm before clipping (log scale)")
    axes.set_ylabel("steps")
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=ROUND, integer=True))
    axes.yaxis.set_major_formatter(PLAIN)
    style(axes, look)
    if axes.get_legend_handles_labels()[0]:
        legend(axes, look)


def _bars(axes: Axes, norms: np.ndarray, columns: Columns, look: Look) -> None:
    """Draw the bars, and a mark on each part of a bar that is too low to be seen."""
    colours, finite = look.palette, norms[np.isfinite(norms)]
    count = int(np.clip(3 * np.sqrt(finite.size), 5, 50))
    edges, below = np.geomspace(finite.min() * 0.97, finite.max() * 1.03, count + 1), np.zeros(count)
    tallest = np.histogram(finite, edges)[0].max()
    for colour, chosen in (
        (colours.norm, ~(columns.clipped | columns.skipped)),
        (colours.clipped, columns.clipped),
        (colours.skipped, columns.skipped),
    ):
        counts, _ = np.histogram(norms[chosen & np.isfinite(norms)], edges)
        if counts.any():
            axes.bar(edges[:-1], counts, np.diff(edges), below, align="edge", color=colour, linewidth=0)
        below += counts
        low = (counts > 0) & (below < tallest / 60)
        middles = np.sqrt(edges[1:][low]) * np.sqrt(edges[:-1][low])
        axes.plot(middles, below[low], color=colour, marker="o", ls="none", ms=5, clip_on=False, zorder=3)


def _threshold_label(columns: Columns) -> str:
    finite = columns.max_norms[np.isfinite(columns.max_norms)]
    if not finite.size:
        return "no threshold"
    return f"threshold {finite[-1]:.3g}" if (finite == finite[-1]).all() else "threshold"


def _size(marks: int) -> float:
    """Return how large marks are, in points: one among thousands of steps is seen, and many leave the line visible."""
    return max(3.0, 8.0 - 0.06 * marks)
