"""Draw final figures against learning rates: a panel for each task, a line for each rule."""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from training_figures import best_fixed, finished, fixed, medians

# Colours that people with any colour vision can tell apart.
LINES = {
    "none": ("#000000", ":"),
    "AdaptiveThreshold": ("#0072B2", "-"),
    "SteadyRule": ("#7A4FD0", "-"),
    "twice the median": ("#56B4E9", "--"),
    "AGC 0.01": ("#009E73", "-."),
    "ZClip": ("#CC79A7", "--"),
    "AutoClip": ("#D55E00", "--"),
    "smartclip": ("#E69F00", "-."),
}
WORST = 2.5  # losses are drawn up to this many times the best


def draw(found, path):
    """Draw the medians over the seeds; all fixed thresholds are thin grey lines."""
    figure = Figure(figsize=(12, 7.5), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3).flat
    for axis, task in zip(axes, found["tasks"].values(), strict=False):
        if fixed(task):
            _panel(axis, task)
    handles = {
        label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=11)
    figure.savefig(path)


def _panel(axis, task):
    accuracy, best = task["figure"] == "accuracy", best_fixed(task)
    for rule in finished(task):
        of_fixed = rule in fixed(task)
        colour, line = ("#BBBBBB", "-") if of_fixed else LINES.get(rule, ("#888888", ":"))
        drawn = np.array(medians(task, rule)) if accuracy else np.minimum(medians(task, rule), 3 * WORST * best)
        label = "fixed, 0.01 to 100" if of_fixed else rule if rule in LINES else None
        if label:
            wide = 2.6 if rule in ("AdaptiveThreshold", "SteadyRule") else 1.0 if of_fixed else 1.6
            axis.plot(task["rates"], drawn, line, color=colour, lw=wide, label=label, zorder=1 if of_fixed else 2)
    axis.axhline(best - 0.05 if accuracy else 1.1 * best, color="#D00000", lw=0.8, label="works")
    axis.set_xscale("log")
    axis.set_title(task["name"], fontsize=12)
    axis.set_xlabel("learning rate")
    axis.set_ylabel(f"{task['figure']}, median of the seeds")
    if not accuracy:
        axis.set_yscale("log")
        axis.set_ylim(best * 0.8, best * WORST)
        for ticks in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            ticks(ScalarFormatter())
    axis.grid(alpha=0.25)
