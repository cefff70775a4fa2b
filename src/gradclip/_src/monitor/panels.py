"""The panels of the picture, each drawn into matplotlib axes in the colours of a palette."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import blended_transform_factory

from gradclip._src.monitor.looks import ROUND, PanelStyle, along_steps, legend, positive
from gradclip._src.monitor.points import bins_of, envelope, largest
from gradclip._src.monitor.records import Columns


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


def share_clipped(axes: Axes, columns: Columns, look: PanelStyle) -> None:
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
