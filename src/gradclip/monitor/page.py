"""The report: one self-contained HTML page, light or dark, for screens of 400 pixels and wider."""

import math
from collections.abc import Iterable, Sequence
from html import escape

from gradclip.monitor.advice import Advice, advise
from gradclip.monitor.picture import NARROW, WIDE, headline, svgs
from gradclip.monitor.records import Columns, Counts, Overview, percentiles, printable

_CAPTIONS = {
    "norms": (
        "Norm over steps",
        "The norm of the gradients before clipping. Above the dashed line, the step was clipped or skipped: what the "
        "optimizer got has at most the norm of the threshold.",
    ),
    "share": ("Share of steps clipped", "The share of steps clipped in each part of the run."),
    "histogram": (
        "Distribution of norms",
        "Norms before clipping. Clipped steps are orange, skipped steps violet. The dashed line is the last threshold. "
        "Percentiles cover all steps shown.",
    ),
    "layers": (
        "Layers",
        "Norms before clipping of the layers with the largest medians, largest first. A column that covers several "
        "steps shows the largest norm.",
    ),
}


def page(shown: Overview, title: str) -> str:
    """Return the HTML page of what a monitor recorded."""
    columns, advice, title = shown.columns, advise(shown.columns), printable(title)
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p class='lead'>{escape(headline(shown))}. "
        "<strong>Every norm on this page is the one before clipping.</strong></p>",
        *(f"<p class='note'>{escape(note)}</p>" for note in notes(shown)),
        _tiles(shown),
        *(_pictures(shown) if len(columns.steps) else []),
        _section("A threshold for these norms", _advised(advice)),
        *_layers(shown),
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


def notes(shown: Overview) -> list[str]:
    """Return notes on what is easily overlooked or misread."""
    counts, columns = shown.counts, shown.columns
    ordinary = columns.clipped[columns.finite & ~columns.skipped]
    found = []
    if ordinary.size and ordinary.all():
        found.append(
            "100% of the steps that were neither skipped nor NaN were clipped: the threshold set the length of every "
            "gradient. If you only mean to clip spikes, the threshold is too low; see the proposal below."
        )
    if counts.steps > counts.nonfinite and not counts.clipped:
        above = "" if not counts.skipped else ", except at skipped steps"
        found.append(f"Nothing was clipped: the norm was never above the threshold{above}.")
    if counts.nonfinite:
        found.append(_about_nonfinite(counts, columns))
    if len(columns.steps) < counts.steps:
        found.append(
            f"Pictures and percentiles show the last {len(columns.steps):,} of {counts.steps:,} steps. The counts "
            "cover all steps. To keep more, use a Monitor with a larger capacity."
        )
    return found


def _about_nonfinite(counts: Counts, columns: Columns) -> str:
    """Say at how many steps the norm was not finite, and what that did to the gradients as far as steps are kept."""
    spoiled = int((~columns.finite & ~columns.skipped).sum())
    skipped = int((~columns.finite & columns.skipped).sum())
    number = f"At {counts.nonfinite:,} of {counts.steps:,} steps the norm was NaN or infinite."
    if not spoiled and counts.skipped:
        known = "They" if skipped == counts.nonfinite else "Those that are kept"
        return f"{number} {known} were skipped: their gradients became zeros." if skipped else number
    which = f" {spoiled:,} of those kept were not skipped." if skipped else ""
    return (
        f'{number}{which} With nonfinite="propagate" such a step fills the gradients with NaN; "skip" and "zero" '
        "prevent that."
    )


def _tiles(shown: Overview) -> str:
    counts, last = shown.counts, shown.last
    tiles = [
        ("steps", f"{counts.steps:,}"),
        ("clipped", f"{counts.share_clipped:.1%}" if counts.steps else "none"),
        ("skipped", f"{counts.skipped:,}"),
        ("not finite", f"{counts.nonfinite:,}"),
        ("last norm", f"{last.norm:.4g}" if last else "none"),
        ("last threshold", f"{last.max_norm:.4g}" if last else "none"),
    ]
    return f"<dl class='tiles'>{''.join(f'<div><dt>{name}</dt><dd>{value}</dd></div>' for name, value in tiles)}</dl>"


def _pictures(shown: Overview) -> Iterable[str]:
    wide, narrow = svgs(shown, WIDE, 10.4), svgs(shown, NARROW, 4.2)
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


def _layers(shown: Overview) -> Iterable[str]:
    if shown.top_layers:
        rows = [(printable(name), f"{norm:.4g}") for name, norm in shown.top_layers.items()]
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


# The pictures' colours are variables, so they change in dark mode.
STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--muted:#5c6470;--grid:#e3e6eb;--norm:#2f6fb1;--clipped:#cf6a0a;
--skipped:#7a4fd0;--nonfinite:#c8202f;--threshold:#111418;--page:#f5f6f8;--card:#fff;--note:#fff4e0;--edge:#e8b765}
@media(prefers-color-scheme:dark){:root{--ink:#e8eaee;--muted:#a3abb8;--grid:#333a45;--norm:#6db1f2;--clipped:#f0993e;
--skipped:#b79bff;--nonfinite:#ff6b72;--threshold:#fff;--page:#14171c;--card:#1d2128;--note:#33280f;--edge:#8a6420}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.6rem;line-height:1.2;margin:0 0 8px}
h2{font-size:1.1rem;margin:0 0 8px}
.lead{margin:0 0 16px}
.note{background:var(--note);border-left:4px solid var(--edge);padding:10px 14px;margin:0 0 12px;border-radius:4px}
section{background:var(--card);border:1px solid var(--grid);border-radius:8px;padding:16px;margin:0 0 16px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(110px,1fr));gap:12px;margin:0 0 16px}
.tiles div{background:var(--card);border:1px solid var(--grid);border-radius:8px;padding:10px 14px}
dt{color:var(--muted);font-size:.85rem}
dd{margin:0;font-size:1.35rem;font-variant-numeric:tabular-nums}
figure{margin:0}
figcaption{color:var(--muted);font-size:.9rem;margin-top:6px}
svg{display:block;width:100%;height:auto}
svg text{font-family:system-ui,sans-serif!important}
.narrow{display:none}
.proposal{margin:0 0 8px}
.proposal code{font-size:1.2rem;font-weight:600;font-family:ui-monospace,monospace}
ul{margin:0 0 12px;padding-left:20px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.95rem}
th,td{text-align:right;padding:5px 8px;border-bottom:1px solid var(--grid)}
th:first-child,td:first-child{text-align:left;overflow-wrap:anywhere}
th{color:var(--muted);font-weight:500;vertical-align:bottom}
@media(max-width:640px){main{padding:16px 10px 32px}section{padding:12px 10px}.wide{display:none}.narrow{display:block}}
"""
