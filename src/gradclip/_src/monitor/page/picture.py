"""The picture of what a monitor recorded. It is drawn with matplotlib, which is imported only when needed."""

import io
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial

import numpy as np

from gradclip._src.monitor.page.tables import percent
from gradclip._src.monitor.records import Overview

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from gradclip._src.monitor.page import panels
    from gradclip._src.monitor.page.looks import Palette, PanelStyle
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"Monitor pictures need matplotlib, and {error.name} is not installed here. Run: pip install matplotlib. "
        "For numbers without it, see records, counts and advise().",
        name=error.name,
        path=error.path,
    ) from error

_PALETTE = Palette()
WIDE = PanelStyle()
NARROW = PanelStyle(points=150, letters=14, legend_columns=2, bars=30)
_HEIGHTS = {"norms": 3.8, "losses": 2.6, "share": 2.2, "layers": 1.8, "histogram": 3.4}  # inches


def draw(shown: Overview) -> Figure:
    """Return a figure with all panels."""
    drawn = _panels(shown, WIDE)
    heights = _heights(shown, drawn)
    figure = Figure(figsize=(11, sum(heights) + 0.6), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(headline(shown), color=_PALETTE.ink, fontsize=13)
    grid = figure.add_gridspec(len(drawn), 1, height_ratios=heights)
    for row, panel in enumerate(drawn.values()):
        panel(figure.add_subplot(grid[row]))
    return figure


def headline(shown: Overview) -> str:
    """Sum up all steps in one line."""
    counts = shown.counts
    if not counts.steps:
        return "No step was recorded"
    others = [
        f"{count:,} {what}" for count, what in ((counts.num_skipped, "skipped"), (counts.num_nonfinite, "not finite"))
    ]
    steps = "1 step" if counts.steps == 1 else f"{counts.steps:,} steps"
    return f"{counts.num_clipped:,} of {steps} clipped ({percent(counts.clipped_share)}); {', '.join(others)}"


def svgs(shown: Overview, look: PanelStyle, width: float) -> dict[str, str]:
    """Return each panel by name as an SVG, `width` inches wide, with CSS variables as colours.

    All panels have the same margins, so a step is at the same place in each of them.
    """
    settings = {"svg.fonttype": "none", "svg.hashsalt": "gradclip"}
    drawn = _panels(shown, look)
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser has more fonts
        figures = [
            _figure(panel, width, height) for panel, height in zip(drawn.values(), _heights(shown, drawn), strict=True)
        ]
        _align(figures)
        return {name: _svg(figure) for name, figure in zip(drawn, figures, strict=True)}


def _heights(shown: Overview, drawn: Iterable[str]) -> list[float]:
    """Return the height of each panel in inches. A panel of layers grows with their number."""
    layers = 0.22 * min(16, len(shown.layers.names)) if shown.layers else 0.0
    return [_HEIGHTS[name] + (layers if name == "layers" else 0.0) for name in drawn]


def _panels(shown: Overview, look: PanelStyle) -> dict[str, Callable[[Axes], None]]:
    """Return what draws each panel, by name. There is one of losses or layers if these were recorded."""
    columns = shown.columns
    of_steps = {"norms": panels.norms_over_steps}
    if np.isfinite(columns.losses).any():
        of_steps["losses"] = panels.losses_over_steps
    of_steps["share"] = panels.clipped_share
    drawn: dict[str, Callable[[Axes], None]] = {
        name: partial(panel, columns=columns, look=look) for name, panel in of_steps.items()
    }
    layers = panels.LayerMap.of(shown)
    if layers is not None:
        drawn["layers"] = partial(panels.layers_over_steps, drawn=layers, steps=columns.steps, look=look)
    drawn["histogram"] = partial(panels.histogram, columns=columns, look=look)
    return drawn


def _figure(panel: Callable[[Axes], None], width: float, height: float) -> Figure:
    """Return a figure of one panel, laid out."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.patch.set_visible(False)
    panel(figure.add_subplot())
    figure.draw_without_rendering()
    return figure


def _align(figures: Sequence[Figure]) -> None:
    """Give the axes of all figures the largest of their margins at the left and at the right."""
    boxes = [figure.axes[0].get_position() for figure in figures]
    left, right = max(box.x0 for box in boxes), min(box.x1 for box in boxes)
    for figure in figures:
        figure.set_layout_engine("none")
        for axes in figure.axes:
            box = axes.get_position()
            axes.set_position((left, box.y0, right - left, box.height))


def _svg(figure: Figure) -> str:
    """Return a figure as an SVG element, with text in the page's own font."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for name, colour in asdict(_PALETTE).items():
        svg = svg.replace(colour, f"var(--{name})")
    return re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', _opening, svg, count=1, flags=re.DOTALL)


def _opening(found: re.Match[str]) -> str:
    links = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {links} viewBox="{found[1]}" role="img">'
