"""Draw norms and the limits of some rules for some histories."""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SHOWN = ("spikes, 1%", "bursts of 20", "level x30", "2,000 zeros", "one NaN")
COLOURS = {"QuantileRule": "#56B4E9", "SpreadRule": "#0072B2", "AutoClip": "#D55E00", "ZClip": "#CC79A7"}
COLOURS |= {"TRELLIS": "#009E73"}
LINES = {"QuantileRule": "-", "SpreadRule": "-", "AutoClip": "--", "ZClip": "-.", "TRELLIS": ":"}


def draw(rules, histories, path):
    """Draw a row for each history: its norms, and the largest norm that each rule would not change."""
    figure = Figure(figsize=(11, 11), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(SHOWN), 1, sharex=True)
    for axis, name in zip(axes, SHOWN, strict=True):
        history = histories[name](np.random.default_rng(0))
        axis.semilogy(history.norms, ".", ms=1.5, color="#999999", label="norms")
        for make in rules:
            if make.name in COLOURS:
                axis.plot(limits(make(), history.norms), LINES[make.name], color=COLOURS[make.name], label=make.name)
        axis.set_title(name, loc="left", fontsize=11)
        axis.set_ylabel("norm")
        axis.set_ylim(1e-2, 200)
    axes[-1].set_xlabel("step")
    axes[0].legend(ncols=6, fontsize=10, loc="upper center", bbox_to_anchor=(0.55, 1.35))
    figure.savefig(path)


def limits(rule, norms):
    found = []
    for norm in norms.tolist():
        rule.after(norm)
        found.append(rule.limit if np.isfinite(rule.limit) else np.nan)
    return found
