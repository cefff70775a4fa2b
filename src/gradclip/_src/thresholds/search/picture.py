"""The picture of a search. It is drawn with matplotlib, which is imported only when needed."""

import math
from collections.abc import Sequence

from gradclip._src.thresholds.search.trials import Trial

try:
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"Pictures of a search need matplotlib, and {error.name} is not installed here. Run: pip install matplotlib. "
        "For numbers without it, print the search, or see its table.",
        name=error.name,
        path=error.path,
    ) from error


_DIVERGED = "a seed diverged"


def draw(table: Sequence[Trial], best: Trial | None) -> Figure:
    """Return a figure of the losses over the thresholds, which are spaced evenly: they may be 0 or infinite."""
    figure = Figure(figsize=(8, 4.6), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    thresholds = sorted({trial.max_norm for trial in table})
    rates = list(dict.fromkeys(trial.learning_rate for trial in table))
    for place, rate in enumerate(rates):
        colour = colormaps["viridis"](0.85 * place / max(1, len(rates) - 1))
        row = [trial for trial in table if trial.learning_rate == rate]
        _line(axis, row, colour, "mean loss" if rate is None else f"learning rate {rate:g}")
    if _all_positive(table):
        axis.set_yscale("log")
    if best is not None:
        where, loss = thresholds.index(best.max_norm), best.loss
        axis.plot(where, loss, "o", ms=15, mfc="none", mec="#cf6a0a", mew=2, label=f"best: {best.max_norm:g}")
    axis.set_xticks(range(len(thresholds)), [f"{threshold:g}" for threshold in thresholds])
    axis.set_xlabel("max_norm")
    axis.set_ylabel("final loss")
    axis.grid(alpha=0.25)
    handles, labels = axis.get_legend_handles_labels()
    named = {label: handle for handle, label in zip(handles, labels, strict=True)}
    axis.legend(named.values(), named.keys())
    return figure


def _line(axis: Axes, row: Sequence[Trial], colour: object, label: str) -> None:
    """Draw the means as a line, each seed as a dot, and a cross at the top where a seed diverged."""
    means = [trial.loss if math.isfinite(trial.loss) else math.nan for trial in row]
    axis.plot(range(len(row)), means, "-o", color=colour, ms=4, lw=2, label=label)
    for place, trial in enumerate(row):
        axis.plot([place] * len(trial.losses), trial.losses, ".", color=colour, alpha=0.5)
        if trial.diverged:
            axis.plot(place, 0.97, "x", color=colour, mew=2, transform=axis.get_xaxis_transform(), label=_DIVERGED)


def _all_positive(table: Sequence[Trial]) -> bool:
    return all(loss > 0 for trial in table for loss in trial.losses if not math.isnan(loss))
