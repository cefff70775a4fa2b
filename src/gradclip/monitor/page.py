"""The report: one HTML page that stands alone, in light and dark, for screens from 400 pixels on."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from gradclip.monitor.advice import Advice
from gradclip.monitor.picture import NARROW, WIDE, headline, svgs
from gradclip.monitor.records import Columns, percentiles
from gradclip.monitor.style import STYLE

if TYPE_CHECKING:
    from gradclip.monitor.monitor import Monitor

_CAPTIONS = {
    "norms": (
        "Norm over steps",
        "The norm of the gradients before clipping. A norm above the dashed line did not get through: that step was "
        "made smaller, and what the optimizer got has the norm of the threshold at most.",
    ),
    "share": ("Share of steps clipped", "How many of the steps were clipped, part of the run by part."),
    "histogram": (
        "How large norms were",
        "Norms before clipping. Steps that were clipped are orange, those that were skipped violet; the dashed line is "
        "the last threshold. Percentiles are of all steps shown.",
    ),
    "layers": (
        "Layers",
        "Norms before clipping of the layers with the largest medians, the largest first. Of several steps in one "
        "column the largest is shown.",
    ),
}


def page(monitor: "Monitor", title: str) -> str:
    """Return the page of what a monitor has recorded."""
    columns, advice = monitor.columns, monitor.advise()
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p class='lead'>{escape(headline(monitor))}. "
        "<strong>Every norm on this page is the one before clipping.</strong></p>",
        *(f"<p class='note'>{escape(note)}</p>" for note in notes(monitor)),
        _tiles(monitor),
        *(_pictures(monitor) if len(columns.steps) else []),
        _section("A threshold for these norms", _advised(advice)),
        *_layers(monitor),
        _section("Percentiles of the norm before clipping", _percentiles(columns)),
    ]
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        "<meta name='color-scheme' content='light dark'>\n<link rel='icon' href='data:,'>\n"
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def notes(monitor: "Monitor") -> list[str]:
    """Return what is easily overlooked or misread."""
    counts, columns = monitor.counts, monitor.columns
    ordinary = columns.clipped[columns.finite & ~columns.skipped]
    found = []
    if ordinary.size and ordinary.all():
        found.append(
            "100% of the steps that were neither skipped nor NaN were clipped: no gradient kept its length, the "
            "threshold set it. Where only spikes are meant to be cut, the threshold is too low; see what is "
            "proposed below."
        )
    if counts.steps > counts.nonfinite and not counts.clipped:
        above = "" if not counts.skipped else ", but for the steps that were skipped"
        found.append(f"Nothing was clipped: at no step was the norm above the threshold{above}.")
    if counts.nonfinite:
        found.append(
            f"At {counts.nonfinite:,} of {counts.steps:,} steps the norm was NaN or infinite. Under "
            'nonfinite="propagate" such a step fills the gradients with NaN; "skip" and "zero" keep them out.'
        )
    if len(columns.steps) < counts.steps:
        found.append(
            f"Pictures and percentiles show the last {len(columns.steps):,} of {counts.steps:,} steps; the counts are "
            "of all. A Monitor with a larger capacity keeps more."
        )
    return found


def _tiles(monitor: "Monitor") -> str:
    counts, last = monitor.counts, monitor.last
    tiles = [
        ("steps", f"{counts.steps:,}"),
        ("clipped", f"{counts.share_clipped:.1%}" if counts.steps else "none"),
        ("skipped", f"{counts.skipped:,}"),
        ("not finite", f"{counts.nonfinite:,}"),
        ("last norm", f"{last.norm:.4g}" if last else "none"),
        ("last threshold", f"{last.max_norm:.4g}" if last else "none"),
    ]
    return f"<dl class='tiles'>{''.join(f'<div><dt>{name}</dt><dd>{value}</dd></div>' for name, value in tiles)}</dl>"


def _pictures(monitor: "Monitor") -> Iterable[str]:
    wide, narrow = svgs(monitor, WIDE, 10.4), svgs(monitor, NARROW, 4.2)
    for name, drawn in wide.items():
        heading, caption = _CAPTIONS[name]
        label = f" aria-label='{heading}'>"
        both = "".join(
            f"<div class='{kind}'>{svg.replace('>', label, 1)}</div>"
            for kind, svg in (("wide", drawn), ("narrow", narrow[name]))
        )
        yield _section(heading, f"<figure>{both}<figcaption>{escape(caption)}</figcaption></figure>")


def _advised(advice: Advice) -> str:
    proposal = "No threshold to propose." if advice.max_norm is None else f"<code>max_norm = {advice.max_norm:g}</code>"
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in advice.reasons)
    rows = [
        (c.name, f"{c.max_norm:.4g}", f"{c.share_clipped:.1%}", f"{c.spikes_clipped} of {advice.spikes}")
        for c in advice.candidates
    ]
    table = _table(("threshold (or percentile)", "value", "steps clipped", "spikes clipped"), rows) if rows else ""
    return f"<p class='proposal'>{proposal}</p><ul>{reasons}</ul>{table}"


def _layers(monitor: "Monitor") -> Iterable[str]:
    if monitor.top_layers:
        rows = [(name, f"{norm:.4g}") for name, norm in monitor.top_layers.items()]
        yield _section("Largest layers", _table(("layer", "median norm before clipping"), rows))


def _percentiles(columns: Columns) -> str:
    found = percentiles(columns.norms, (0, 1, 10, 25, 50, 75, 90, 99, 100))
    if not found:
        return "<p>No norm was finite.</p>"
    names = {0: "smallest", 50: "median", 100: "largest"}
    threshold = float(columns.max_norms[-1])
    rows = [
        (names.get(int(which), f"{which:g}%"), f"{norm:.4g}", _times(norm, threshold)) for which, norm in found.items()
    ]
    return _table(("percentile", "norm", "of the last threshold"), rows)


def _times(norm: float, threshold: float) -> str:
    return f"{norm / threshold:.2%}" if 0 < threshold < math.inf else "none"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def row(cells: Sequence[str], kind: str) -> str:
        return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f"<div class='scroll'><table><thead>{row(head, 'th')}</thead><tbody>{body}</tbody></table></div>"


def _section(heading: str, inside: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{inside}</section>"
