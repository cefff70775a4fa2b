"""The picture of what a monitor recorded. It is drawn with matplotlib, which is imported only when needed."""

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import asdict

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
    columns, layers = shown.columns, shown.layers
    rows = 3 if layers is None else 4
    figure = Figure(figsize=(11, 3 * rows + 0.6), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(headline(shown), color=_PALETTE.ink, fontsize=13)
    grid = figure.add_gridspec(rows, 1, height_ratios=[1.5, 0.7, 1.1, 1][:rows])
    panels.norms_over_steps(figure.add_subplot(grid[0]), columns, WIDE)
    panels.share_clipped(figure.add_subplot(grid[1]), columns, WIDE)
    panels.histogram(figure.add_subplot(grid[2]), columns, WIDE)
    if layers is not None:
        panels.layers_over_steps(figure.add_subplot(grid[3]), layers, WIDE)
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
    columns, layers = shown.columns, shown.layers
    narrow = look is NARROW
    drawn = {
        "norms": _svg(lambda axes: panels.norms_over_steps(axes, columns, look), width, 4.2 if narrow else 3.8),
        "share": _svg(lambda axes: panels.share_clipped(axes, columns, look), width, 2.2),
        "histogram": _svg(lambda axes: panels.histogram(axes, columns, look), width, 3.4),
    }
    if layers is not None:
        height = 1.4 + 0.24 * min(16, len(layers.names))
        drawn["layers"] = _svg(lambda axes: panels.layers_over_steps(axes, layers, look), width, height)
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
