"""Draw the chart of the page on accelerators: one norm for all on GPUs, from the results of gpu.py.

A bar is a time as a multiple of the floor, and stands beside its milliseconds.
"""

import matplotlib
from gpu_results import FLOOR, KERNELS, PEER, measured, together
from gpu_tables import GLOBAL
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from report import GPU_PICTURE, rounded

CASES = ("not clipped", "clipped")
# They can be read on white and on black, with every kind of colour vision. The background is the page's.
BARS = {KERNELS: "#2C8FCB", PEER: "#D55E00"}
LABELS = {KERNELS: "gradclip", PEER: "PyTorch"}
TEXT = "#767676"
HEIGHT = 0.38
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def draw(results, path):
    """Draw a row of two panels for each device."""
    matplotlib.rcParams["svg.hashsalt"] = "gradclip"  # the same results give the same file
    devices = [(found["device"], chosen(found["rows"])) for found in results]
    heights = [len(rows) + 2 for _, rows in devices]
    figure = Figure(figsize=(9.6, 1 + 0.5 * sum(heights)), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(len(devices), 2, squeeze=False, sharey="row", height_ratios=heights)
    for (device, rows), panels in zip(devices, axes, strict=True):
        for axis, case in zip(panels, CASES, strict=True):
            _draw_panel(axis, {words: cases[case]["times"] for words, cases in rows.items() if case in cases}, rows)
            axis.set_title(f"{device}, {case}", fontsize=12, color=TEXT)
    for name, colour in BARS.items():
        axes[0, 0].barh(0, 0, color=colour, label=LABELS[name])
    axes[0, 0].axvline(1, color=TEXT, lw=2, label="floor")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, labelcolor=TEXT, fontsize=12)
    figure.savefig(path, transparent=True, metadata={"Date": None})


def chosen(rows):
    """Return {workload and dtype: {case: row}} of the calls with one norm for all."""
    return {key[:2]: cases for key, cases in together(rows).items() if key[2] == GLOBAL}


def _draw_panel(axis, times, rows):
    most = 2.0
    for place, words in enumerate(rows):
        found = times.get(words, {})
        for shift, name in zip((-HEIGHT / 2, HEIGHT / 2), BARS, strict=True):
            if name in found and FLOOR in found:
                ratio = found[name]["ms"] / found[FLOOR]["ms"]
                _draw_bar(axis, place + shift, ratio, BARS[name], f"{rounded(found[name]['ms'], 3)} ms")
                most = max(most, ratio)
    axis.axvline(1, color=TEXT, lw=2)
    axis.set_yticks(range(len(rows)), ["\n".join(words) for words in rows])
    _finish(axis, most)


def _draw_bar(axis, place, ratio, colour, text):
    axis.barh(place, ratio - 1, left=1, height=HEIGHT, color=colour)
    axis.text(max(ratio, 1) * 1.05, place, text, fontsize=10, va="center", color=TEXT)


def _finish(axis, most):
    axis.set_xscale("log")
    axis.set_xlim(0.5, most * 2.5)
    axis.set_xticks([tick for tick in TICKS if tick <= most * 1.5])
    axis.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}×"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("multiple of the floor", fontsize=11, color=TEXT)
    axis.tick_params(labelsize=11, length=0, colors=TEXT)
    axis.spines[:].set_visible(False)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    if not axis.yaxis_inverted():
        axis.invert_yaxis()


def main():
    results = [found for found in measured() if chosen(found["rows"])]
    if not results:
        print("nothing has been timed on a GPU, so there is nothing to draw")
        return
    draw(results, GPU_PICTURE)
    print(f"written: {GPU_PICTURE}")


if __name__ == "__main__":
    main()
