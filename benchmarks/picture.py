"""Draw the results of clipping.py and growth.py in one picture."""

import argparse
import json
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator
from report import CLIPPING, GROWTH, PICTURE, library, readable_bytes, rounded

# These colours suit every kind of colour vision. Markers and line styles also differ.
COLOURS = {"gradclip": "#0072B2", "torch": "#D55E00", "floor": "#555555"}
MARKERS = {"gradclip": "o", "torch": "s", "floor": "^"}
LINES = {"not clipped": "-", "clipped": "--"}
BARS = {"not clipped": "#D55E00", "clipped": "#F3B183"}
OFFSETS = {"not clipped": -0.2, "clipped": 0.2}
JAX = {"JAX jitted float32": "jax.jit", "JAX donated float32": "jax.jit, donated", "JAX eager float32": "eager JAX"}


def draw(clipping, growth, path):
    figure = Figure(figsize=(12, 15), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1.9))
    _draw_growth(upper, growth)
    _draw_ratios(lower, clipping["rows"])
    threads, repeats = clipping["threads"], min(clipping["repeats"], growth["repeats"])
    figure.suptitle(f"Clipping on {threads} CPU threads: medians of {repeats} calls or more, in turns", fontsize=14)
    figure.savefig(path)


def _draw_growth(figure, growth):
    left, right = figure.subplots(1, 2)
    _draw_curves(left, growth["growth"], "tensors", "number of tensors, of 64 float32 elements each")
    _draw_curves(right, growth["growth"], "bytes", "size of one float32 tensor")
    left.set_ylabel("time of a call", fontsize=12)
    right.xaxis.set_major_formatter(FuncFormatter(lambda size, _: readable_bytes(int(size))))
    right.tick_params(axis="x", labelrotation=30)
    who = [Line2D([], [], color=COLOURS[name], marker=MARKERS[name], label=name) for name in COLOURS]
    case = [Line2D([], [], color="black", ls=line, label=name) for name, line in LINES.items()]
    left.legend(handles=who + case, loc="upper left", fontsize=11, framealpha=1)


def _draw_curves(axis, rows, along, label):
    for name, colour in COLOURS.items():
        for case, line in LINES.items():
            points = [
                (row["number"], row["ms"] / 1e3)
                for row in rows
                if (row["along"], row["case"], library(row["name"])) == (along, case, name)
            ]
            axis.loglog(*zip(*points, strict=True), color=colour, ls=line, marker=MARKERS[name], ms=5, lw=1.8)
    axis.set_xticks(sorted({row["number"] for row in rows if row["along"] == along}))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{int(number):,}"))
    axis.yaxis.set_major_formatter(FuncFormatter(_readable_seconds))
    axis.set_xlabel(label, fontsize=12)
    axis.tick_params(labelsize=11)
    axis.grid(alpha=0.3)


def _readable_seconds(seconds, _position):
    unit, size = next((pair for pair in (("s", 1), ("ms", 1e-3)) if seconds >= pair[1] * 0.999), ("µs", 1e-6))
    return f"{seconds / size:g} {unit}"


def _draw_ratios(figure, rows):
    left, right = figure.subplots(1, 2)
    _draw_bars(left, _groups([row for row in rows if row["kind"].startswith("torch")], _torch_place))
    _draw_bars(right, _groups([row for row in rows if not row["kind"].startswith("torch")], _other_place))
    left.set_title("PyTorch", fontsize=13)
    right.set_title("NumPy and JAX, GPT-2 small, float32", fontsize=13)
    cases = [Patch(color=colour, label=f"the library replaced, {case}") for case, colour in BARS.items()]
    floor = Line2D([], [], color="black", marker="D", ls="", label="floor: plain read (and write)")
    figure.legend(handles=[*cases, floor], loc="outside upper center", ncols=3, fontsize=11)


def _torch_place(row):
    return row["workload"], row["kind"].removeprefix("torch ")


def _other_place(row):
    return JAX.get(row["kind"], "NumPy in place"), library(row["name"])


def _groups(rows, place):
    """Return {heading: {label: {case: (ratio of the replaced library, ratio of the floor)}}}."""
    floors = {(row["workload"], row["kind"], row["case"]): row["of ours"] for row in rows if row["name"] == "floor"}
    groups = {}
    for row in rows:
        if library(row["name"]) not in ("floor", "gradclip"):
            heading, label = place(row)
            floor = floors.get((row["workload"], row["kind"], row["case"]))
            groups.setdefault(heading, {}).setdefault(label, {})[row["case"]] = (row["of ours"], floor)
    return groups


def _draw_bars(axis, groups):
    ticks, at = {}, 0.0
    for heading, bars in groups.items():
        ticks[at] = heading
        for label, cases in bars.items():
            at += 1
            ticks[at] = label
            for case, (ratio, floor) in cases.items():
                _draw_bar(axis, at + OFFSETS[case], ratio, floor, BARS[case])
        at += 1.3
    ratios = [ratio for bars in groups.values() for cases in bars.values() for pair in cases.values() for ratio in pair]
    known = [ratio for ratio in ratios if ratio]
    axis.set_xscale("log")
    axis.set_xlim(min(*known, 0.5) / 1.3, max(known) * 1.6)
    axis.set_ylim(at - 0.5, -0.7)
    axis.set_yticks(list(ticks), ticks.values(), fontsize=11)
    for tick in axis.get_yticklabels():
        tick.set_weight("bold" if tick.get_text() in groups else "normal")
    _finish(axis)


def _draw_bar(axis, at, ratio, floor, colour):
    axis.barh(at, ratio - 1, left=1, height=0.38, color=colour)
    axis.text(max(ratio, 1) * 1.04, at, f"{rounded(ratio, 2)}×", fontsize=10, va="center")
    if floor:
        axis.plot(floor, at, "D", color="black", ms=4)


def _finish(axis):
    axis.axvline(1, color=COLOURS["gradclip"], lw=2)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}×"))
    axis.set_xticks([t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if axis.get_xlim()[0] <= t <= axis.get_xlim()[1]])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("time, as a multiple of gradclip's (blue line)", fontsize=12)
    axis.tick_params(axis="x", labelsize=11)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clipping", type=Path, default=CLIPPING)
    parser.add_argument("--growth", type=Path, default=GROWTH)
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    draw(json.loads(options.clipping.read_text()), json.loads(options.growth.read_text()), options.out)
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
