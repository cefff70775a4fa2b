"""Draw the bar chart of the page on speed: a few rows of clipping.py's results."""

import json

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from report import CLIPPING, SPEED_PICTURE, rounded
from speed_tables import CASES, chosen

# They can be read on white and on black, with every kind of colour vision. The background is the page's.
BARS = {"not clipped": "#D55E00", "clipped": "#E9A36B"}
LINE, TEXT = "#2C8FCB", "#767676"
HEIGHT = 0.38


def draw(results, path):
    matplotlib.rcParams["svg.hashsalt"] = "gradclip"  # the same results give the same file
    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    FigureCanvasSVG(figure)
    axis = figure.subplots()
    found = chosen(results["rows"])
    for place, cases in enumerate(found.values()):
        for shift, case in zip((-HEIGHT / 2, HEIGHT / 2), CASES, strict=True):
            _draw_bar(axis, place + shift, cases[case].ratio, BARS[case])
    for case in CASES:
        axis.barh(0, 0, color=BARS[case], label=case)
    axis.axvline(1, color=LINE, lw=2, label="gradclip")
    axis.set_yticks(range(len(found)), [label.replace(", ", "\n", 1) for label in found])
    _finish(axis, max(compared.ratio for cases in found.values() for compared in cases.values()))
    figure.suptitle(f"CPU, {results['threads']} threads: time of the library replaced", fontsize=14, color=TEXT)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, labelcolor=TEXT, fontsize=12)
    figure.savefig(path, transparent=True, metadata={"Date": None})


def _draw_bar(axis, place, ratio, colour):
    axis.barh(place, ratio - 1, left=1, height=HEIGHT, color=colour)
    axis.text(max(ratio, 1) * 1.05, place, f"{rounded(ratio, 2)}×", fontsize=11, va="center", color=TEXT)


def _finish(axis, most):
    axis.set_xscale("log")
    axis.set_xlim(0.8, most * 1.5)
    axis.set_xticks([1, 2, 5, 10, 20])
    axis.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}×"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.invert_yaxis()
    axis.set_xlabel("multiple of gradclip's time", fontsize=12, color=TEXT)
    axis.tick_params(labelsize=12, length=0, colors=TEXT)
    axis.spines[:].set_visible(False)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)


if __name__ == "__main__":
    draw(json.loads(CLIPPING.read_text()), SPEED_PICTURE)
    print(f"written: {SPEED_PICTURE}")
