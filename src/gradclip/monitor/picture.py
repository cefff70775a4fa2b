"""The picture of what a monitor recorded. It is drawn with matplotlib, which is imported only when needed."""

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from gradclip.monitor.records import Overview

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from gradclip.monitor import panels
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"Monitor pictures need matplotlib, and {error.name} is not installed here. Run: pip install matplotlib. "
        "For numbers without it, see records, counts and advise().",
        name=error.name,
        path=error.path,
    ) from error

_PALETTE = panels.Palette()
WIDE = panels.Look()
NARROW = panels.Look(points=150, letters=14, legend_columns=2)


def draw(shown: Overview) -> Figure:
    """Return a figure with all panels."""
    drawn = _panels(shown, WIDE)
    rows = len(drawn)
    figure = Figure(figsize=(11, 3 * rows + 0.6), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(headline(shown), color=_PALETTE.ink, fontsize=13)
    grid = figure.add_gridspec(rows, 1, height_ratios=[1.5, 0.7, 1.1, 1][:rows])
    for row, panel in enumerate(drawn.values()):
        panel(figure.add_subplot(grid[row]))
    return figure


def headline(shown: Overview) -> str:
    """Sum up all steps in one line."""
    counts = shown.counts
    if not counts.steps:
        return "No step was recorded"
    others = [f"{count:,} {what}" for count, what in ((counts.skipped, "skipped"), (counts.nonfinite, "not finite"))]
    steps = "1 step" if counts.steps == 1 else f"{counts.steps:,} steps"
    return f"{counts.share_clipped:.1%} of {steps} clipped; {', '.join(others)}"


def svgs(shown: Overview, look: panels.Look, width: float) -> dict[str, str]:
    """Return each panel by name as an SVG, `width` inches wide, with CSS variables as colours."""
    heights = {"norms": 4.2 if look is NARROW else 3.8, "share": 2.2, "histogram": 3.4}
    if shown.layers is not None:
        heights["layers"] = 1.4 + 0.24 * min(16, len(shown.layers.names))
    return {name: _svg(panel, width, heights[name]) for name, panel in _panels(shown, look).items()}


def _panels(shown: Overview, look: panels.Look) -> dict[str, Callable[[Axes], None]]:
    """Return what draws each panel, by name. There is one of layers if layers were recorded."""
    of_steps = {"norms": panels.norms_over_steps, "share": panels.share_clipped, "histogram": panels.histogram}
    drawn: dict[str, Callable[[Axes], None]] = {
        name: partial(panel, columns=shown.columns, look=look) for name, panel in of_steps.items()
    }
    if shown.layers is not None:
        drawn["layers"] = partial(panels.layers_over_steps, table=shown.layers, look=look)
    return drawn


def _svg(panel: Callable[[Axes], None], width: float, height: float) -> str:
    """Return one panel as an SVG element, with text in the page's own font."""
    settings = {"svg.fonttype": "none", "svg.hashsalt": "gradclip"}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser has more fonts
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.patch.set_visible(False)
        panel(figure.add_subplot())
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
