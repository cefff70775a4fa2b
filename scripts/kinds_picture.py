"""Draw what each kind of clipping does to a gradient, for the page on which clipping to use: two numbers in a plane.

gradclip computes what is drawn. Each number is a layer, a row or an element, as the kind asks.
"""

import hashlib
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

import gradclip

FOLDER = Path(__file__).parent.parent / "docs" / "assets" / "kinds"
# They can be read on white and on black, with every kind of colour vision. The background is the page's.
BEFORE, AFTER, EDGE, TEXT = "#8A8A8A", "#D55E00", "#2C8FCB", "#767676"
GRADIENT = np.array([2.6, 1.2])


def by_norm(gradient, max_norm=1.0):
    return gradclip.clip_by_global_norm(gradient, max_norm)[0]


def globally(axes):
    _circle(axes, 1.0)
    _arrows(axes, GRADIENT, by_norm(GRADIENT))
    _names(axes, "layer 1", "layer 2")


def by_layer(axes):
    _box(axes, 1.0, 1.0)
    _arrows(axes, GRADIENT, np.concatenate(gradclip.clip_by_layer_norm([GRADIENT[:1], GRADIENT[1:]], 1.0)[0]))
    _names(axes, "layer 1", "layer 2")


def by_unit(axes):
    params = np.array([[0.7, 1.1], [0.0, 0.0]])
    clipped = gradclip.adaptive_grad_clip(GRADIENT * [[1.0], [0.0]], params, clipping=1.0)[0]
    _box(axes, *params[0])
    _arrows(axes, GRADIENT, clipped[0])
    _names(axes, "unit 1", "unit 2")


def by_value(axes):
    _box(axes, 1.0, 1.0)
    _arrows(axes, GRADIENT, gradclip.clip_by_value(GRADIENT, 1.0))
    _names(axes, "element 1", "element 2")


def adaptively(axes):
    threshold = gradclip.AdaptiveThreshold(gradclip.QuantileRule(1, 0.5, window=3))
    direction = GRADIENT / np.linalg.norm(GRADIENT)
    for norm in (1.3, 1.3, 1.3, 1.0, 1.0, 0.7, 0.7, 0.7):
        gradclip.clip_grad_norm_(direction * norm, threshold)
        _circle(axes, threshold.next_max_norm, linestyle=":")
    _circle(axes, threshold.next_max_norm)
    _arrows(axes, GRADIENT, by_norm(GRADIENT, threshold.next_max_norm))
    _names(axes, "layer 1", "layer 2")


def per_example(axes):
    examples = np.array([[2.6, 1.2], [0.3, 0.8], [-0.6, 0.3]])
    _circle(axes, 1.0)
    clipped = np.stack([*map(by_norm, examples)])
    for before, after in zip(examples, clipped, strict=True):
        _arrows(axes, before, after)
    _names(axes, "layer 1", "layer 2")


KINDS = {
    "global": globally,
    "layer": by_layer,
    "agc": by_unit,
    "value": by_value,
    "adaptive": adaptively,
    "example": per_example,
}


def _circle(axes, radius, linestyle="-"):
    axes.add_patch(Circle((0, 0), radius, fill=False, color=EDGE, linestyle=linestyle, linewidth=1.5))


def _box(axes, width, height):
    axes.add_patch(Rectangle((-width, -height), 2 * width, 2 * height, fill=False, color=EDGE, linewidth=1.5))


def _arrows(axes, before, after):
    for to, colour, width in ((before, BEFORE, 1.5), (after, AFTER, 3)):
        style = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=to, xytext=(0, 0), arrowprops=style)


def _names(axes, across, up):
    axes.set(xlim=(-1.5, 2.8), ylim=(-1.3, 1.5), aspect="equal")
    axes.text(2.8, -0.12, across, ha="right", va="top", color=TEXT, fontsize=11)
    axes.text(-0.1, 1.5, up, ha="right", va="top", color=TEXT, fontsize=11)
    axes.axhline(0, color=TEXT, linewidth=0.5)
    axes.axvline(0, color=TEXT, linewidth=0.5)
    axes.axis("off")


def mark():
    """Return the comment in each picture that says from which code it was drawn."""
    return f"<!-- drawn by kinds_picture.py, {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()} -->\n"


def draw(name, path):
    matplotlib.rcParams["svg.hashsalt"] = "gradclip"  # the same code gives the same file
    figure = Figure(figsize=(3.2, 2.1), layout="constrained")
    FigureCanvasSVG(figure)
    KINDS[name](figure.subplots())
    figure.savefig(path, transparent=True, metadata={"Date": None})
    with path.open("a", encoding="utf-8") as file:
        file.write(mark())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in KINDS:
        draw(name, FOLDER / f"{name}.svg")
        print(f"written: {FOLDER / name}.svg")
