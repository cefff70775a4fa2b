"""Draw the results of private_steps.py: time and memory of private steps as multiples of the plain step's."""

import argparse
import json
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from private_networks import CONTENDERS, NOISED, PLAIN, WORKLOADS
from report import PRIVATE_STEPS, PRIVATE_STEPS_PICTURE

# These colours suit every kind of colour vision. Markers also differ.
DRAWN = {
    "gradclip, auto": ("o", "#0072B2"),
    NOISED: ("D", "#009E73"),
    "gradclip, materialize": ("s", "#56B4E9"),
    "jax.vmap and optax": ("^", "#D55E00"),
    "jax_privacy": ("v", "#E69F00"),
    "Opacus hooks": ("^", "#D55E00"),
    "Opacus ghost": ("v", "#E69F00"),
}
SHORT = {
    "perceptron": "perceptron",
    "recurrent": "GRU",
    "transformer": "transformer, 64",
    "tied": "tied, 10,000",
    "convolution": "convolution",
    "large tied": "tied, 256,000",
    "long transformer": "transformer, 512",
}


def draw(rows, path):
    matplotlib.rcParams["svg.hashsalt"] = "gradclip"  # the same results give the same file
    figure = Figure(figsize=(6.2, 15.5), layout="constrained")
    FigureCanvasSVG(figure)
    figure.get_layout_engine().set(h_pad=0.12)
    for part, framework in zip(figure.subfigures(2, 1), CONTENDERS, strict=True):
        axes = part.subplots(2, 1)
        one_core = [row for row in rows if (row["framework"], row["threads"]) == (framework, 1)]
        _draw(axes[0], one_core, lambda row: row["processor ms"], "time")
        _draw(axes[1], one_core, lambda row: row["bytes"], "memory")
        part.suptitle(framework, fontsize=17, weight="bold")
        handles, names = axes[0].get_legend_handles_labels()
        part.legend(handles, names, loc="outside lower center", ncols=2, fontsize=13, frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw(axis, rows, quantity, named):
    places = {network: len(WORKLOADS) - i for i, network in enumerate(WORKLOADS)}
    plain = {row["network"]: quantity(row) for row in rows if row["name"] == PLAIN}
    here = [name for name in DRAWN if any(row["name"] == name for row in rows)]
    for i, name in enumerate(here):
        found = [row for row in rows if row["name"] == name and "reason" not in row]
        ratios = [quantity(row) / plain[row["network"]] for row in found]
        heights = [places[row["network"]] + 0.14 * ((len(here) - 1) / 2 - i) for row in found]
        marker, colour = DRAWN[name]
        axis.plot(ratios, heights, marker, color=colour, ms=10, mec="white", mew=0.8, label=name, zorder=9 - i)
    axis.axvline(1, color="#444444", lw=1.5, zorder=1)
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    axis.set_xlim(min(low, 0.4), max(high, 20))
    axis.set_xticks([tick for tick in (0.5, 1, 2, 5, 10, 30, 100, 300, 1000) if tick <= axis.get_xlim()[1]])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}×"))
    axis.set_ylim(0.4, len(places) + 0.6)
    axis.set_yticks(list(places.values()), [SHORT[network] for network in places])
    axis.tick_params(labelsize=13, length=0)
    axis.set_title(f"{named}, as a multiple of the plain step's", fontsize=13)
    axis.grid(alpha=0.35)
    axis.set_axisbelow(True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, default=PRIVATE_STEPS)
    parser.add_argument("--out", type=Path, default=PRIVATE_STEPS_PICTURE)
    options = parser.parse_args()
    draw(json.loads(options.measured.read_text())["rows"], options.out)
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
