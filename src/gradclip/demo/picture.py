"""The picture that compares the runs: loss at the top, gradient norm at the bottom."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gradclip.demo.results import GUESSING_LOSS, RunResult

# Colours that people with any colour vision can tell apart.
_COLOURS = ("#D55E00", "#0072B2", "#009E73")
_BINS = 100


def write_picture(runs: tuple[RunResult, ...], title: str, path: Path) -> Path:
    """Draw one column for each run, on shared axes, and save it as a PNG."""
    figure = Figure(figsize=(5.5 * len(runs), 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(2, len(runs), sharex=True, sharey="row", squeeze=False)
    for run, colour, (upper, lower) in zip(runs, _COLOURS, axes.T, strict=False):
        _draw(upper, run.curves.losses, colour)
        _draw(lower, run.curves.norms, colour)
        upper.axhline(GUESSING_LOSS, color="black", ls=":", lw=1.3, label="guessing")
        _draw_thresholds(lower, run.curves.max_norms)
        upper.set_title(f"{run.name}: median test accuracy {run.median_test_accuracy:.1%}")
        lower.set_xlabel("training step")
        upper.set_xlim(0, run.curves.losses.shape[1] + 1)
    axes[0, 0].set_ylabel("training loss (nats)")
    axes[1, 0].set_ylabel("gradient norm before clipping")
    for axis in axes[:, 0]:
        _make_room_above(axis)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.legend(loc="upper right", framealpha=0.9, fontsize=9, ncols=2)
    figure.savefig(path)
    return path


def _draw(axis: Axes, curves: np.ndarray, colour: str) -> None:
    axis.set_yscale("log")
    # Infinity, not NaN, so the median over seeds stops once most of them have diverged.
    curves = np.where(np.isfinite(curves), curves, np.inf)
    steps = np.arange(1, curves.shape[1] + 1)
    axis.plot(steps, _drawable(curves).T, color=colour, lw=0.5, alpha=0.25)
    axis.plot([], [], color=colour, lw=1, alpha=0.5, label=f"{len(curves)} seeds")
    bins = np.array_split(np.arange(len(steps)), min(_BINS, len(steps)))
    centres = [steps[bin_].mean() for bin_ in bins]
    medians = np.array([np.median(curves[:, bin_]) for bin_ in bins])
    axis.plot(centres, _drawable(medians), color=colour, lw=2.2, label="median")
    _mark_divergence(axis, curves)


def _draw_thresholds(axis: Axes, max_norms: np.ndarray) -> None:
    """Draw the median threshold over the seeds, if there is one."""
    usual = np.median(max_norms, axis=0)
    if not np.isfinite(usual).any():
        return
    same = len(np.unique(usual)) == 1
    label = f"max_norm {usual[0]:g}" if same else "max_norm, median"
    axis.plot(np.arange(1, len(usual) + 1), _drawable(usual), color="black", ls="--", lw=1.3, label=label)


def _mark_divergence(axis: Axes, curves: np.ndarray) -> None:
    """Put a cross at the last finite point of a curve before it diverged."""
    broken = ~np.isfinite(curves)
    ends = [(row, int(at.argmax()) - 1) for row, at in enumerate(broken) if at.any()]
    points = [(end + 1, curves[row, end]) for row, end in ends if end >= 0]
    if ends:
        x, y = zip(*points, strict=True) if points else ((), ())
        label = f"not finite after: {len(ends)} of {len(curves)}"
        axis.plot(x, y, "x", color="black", ms=8, mew=2, label=label)


def _make_room_above(axis: Axes) -> None:
    """Leave the top fifth of the height for the legend."""
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * (high / low) ** 0.25)


def _drawable(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)
