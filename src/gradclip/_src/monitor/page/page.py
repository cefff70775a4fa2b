"""The report: one self-contained HTML page, light or dark, for screens of 400 pixels and wider."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from html import escape
from typing import NamedTuple

import numpy as np

from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.monitor.advice import Advice, advise
from gradclip._src.monitor.page.picture import NARROW, WIDE, headline, svgs
from gradclip._src.monitor.page.tables import cut, number, percent, section, table, times
from gradclip._src.monitor.records import Columns, Counts, Layers, Overview, Step, percentiles
from gradclip._src.versions import version_text
from gradclip._src.words import printable, typed

_MOST = 8  # of each kind
_NAMED = 3  # layers that are not finite


class NotableStep(NamedTuple):
    """A step, what happened at it, and the layers responsible; empty if its layers were not recorded."""

    step: Step
    what: str
    layers: str


def events(shown: Overview, most: int = _MOST) -> list[NotableStep]:
    """Return the most notable steps of each kind: first the latest that are not finite, then those skipped, clipped.

    Steps that were skipped or clipped come in the order of norm / threshold, the largest first.
    """
    columns = shown.columns
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        factors = np.where(columns.max_norms > 0, columns.norms / columns.max_norms, columns.norms)
    measured, found = shown.layers_of_spikes, []
    for what, chosen, weights in _kinds(columns, factors):
        places = np.flatnonzero(chosen)
        for place in places[np.argsort(-weights[places], kind="stable")][:most].tolist():
            step = shown.records[place]
            layers = step.layers or measured.get(step.step)
            found.append(NotableStep(step, what, responsible(layers) if layers else ""))
    return found


def _kinds(columns: Columns, factors: np.ndarray) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return each kind of event: its name, which steps are of that kind, and how notable each is."""
    bad, late = ~columns.finite, columns.steps
    return [
        ("not finite", bad & ~columns.skipped, late),
        ("not finite, skipped", bad & columns.skipped, late),
        ("skipped", ~bad & columns.skipped, factors),
        ("clipped", columns.clipped, factors),
    ]


def responsible(layers: Layers) -> str:
    """Name the layers whose norms are not finite, or else the layer with the largest share of the squared norm."""
    bad = np.flatnonzero(~np.isfinite(layers.norms)).tolist()
    if bad:
        told = [f"{layers.names[place]} ({number(float(layers.norms[place]))})" for place in bad[:_NAMED]]
        return ", ".join(told) + (f" and {len(bad) - _NAMED:,} more" if len(bad) > _NAMED else "")
    norms = layers.norms.astype(np.float64)
    if not norms.size or norms.max() <= 0:
        return ""
    shares = (norms / norms.max()) ** 2
    place = int(shares.argmax())
    return f"{layers.names[place]} ({shares[place] / shares.sum():.0%})"


def happened(shown: Overview) -> Iterable[str]:
    """Return the section of the steps that were clipped, skipped or not finite; none without such steps."""
    found = events(shown)
    if not found:
        return
    with_layers = any(event.layers for event in found)
    head = ("step", "norm", "norm / threshold", "what", *(["layer, share"] * with_layers))
    rows = [_row(event, with_layers) for event in found]
    yield section(
        "Steps to look at",
        f"<p>{escape(_how_many(found, shown.counts, with_layers))}</p>{table(head, rows, (3, 4))}",
    )


def spiked(shown: Overview) -> Iterable[str]:
    """Return the section of the spikes, each in a sentence on its layers, loss and context; none without spikes."""
    if shown.spikes:
        told = "".join(f"<li>{escape(printable(str(spike)))}</li>" for spike in shown.spikes)
        yield section("Spikes", f"<ul class='spikes'>{told}</ul>")


def _row(event: NotableStep, with_layers: bool) -> list[str]:
    step = event.step
    cells = [f"{step.step:,}", number(step.norm), times(step.norm, step.max_norm), event.what]
    return cells + ([event.layers or "not recorded"] if with_layers else [])


def _how_many(found: list[NotableStep], counts: Counts, with_layers: bool) -> str:
    """Say how many steps there were of each kind, which of them are listed, and how to see their layers."""
    kinds = ((counts.num_nonfinite, "not finite"), (counts.num_skipped, "skipped"), (counts.num_clipped, "clipped"))
    told = ", ".join(f"{count:,} {what}" for count, what in kinds if count)
    hint = (
        " A share is that of the squared norm."
        if with_layers
        else " To see the layer responsible, use Monitor(layers_every=1)."
    )
    return (
        f"Steps in all: {told}. The table shows {len(found):,} of them: those not finite with the latest first, others "
        f"with the largest first.{hint}"
    )


def advised(advice: Advice, shown: Overview) -> str:
    """Return the proposal with its reasons, and other thresholds to compare."""
    told = [*advice.reasons, *about_proposal(shown, advice)]
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in told)
    rows = [
        (c.name, number(c.max_norm), percent(c.clipped_share), f"{c.spikes_clipped} of {advice.spikes}")
        for c in advice.candidates
    ]
    head = ("threshold (or percentile)", "value", "steps clipped", "spikes clipped")
    values = ", then ".join(f"<code>{value:g}</code>" for value in advice.try_values)
    tried = (
        f"<p>To compare, train with max_norm = {values}.</p>"
        if len(advice.try_values) > 1 and advice.state != "level"
        else ""
    )
    return (
        f"<p class='proposal'>{escape(advice.proposal)}</p>{tried}<ul>{reasons}</ul>{table(head, rows) if rows else ''}"
    )


def largest_layers(shown: Overview) -> Iterable[str]:
    """Return the section of the layers with the largest medians; none if no layers were recorded."""
    if shown.top_layers:
        rows = [(name, number(norm)) for name, norm in shown.top_layers.items()]
        yield section("Largest layers", table(("layer", "median norm before clipping"), rows))


def of_percentiles(columns: Columns) -> str:
    """Return the percentiles of the norms, and how many times the last threshold they are."""
    found = percentiles(columns.norms, (0, 1, 10, 25, 50, 75, 90, 99, 100))
    if not found:
        return "<p>No norm was finite.</p>"
    names = {0: "smallest", 50: "median", 100: "largest"}
    threshold = float(columns.max_norms[-1])
    rows = [
        (names.get(int(which), f"{which:g}%"), number(norm), times(norm, threshold)) for which, norm in found.items()
    ]
    return table(("percentile", "norm", "norm / last threshold"), rows)


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
.tiles .proposed{border:2px solid var(--norm);grid-column:span 2}
small{color:var(--muted);font-size:.85rem}
.facts{display:flex;flex-wrap:wrap;gap:2px 18px;margin:0 0 14px}
.facts div{display:flex;gap:6px;min-width:0}
.facts dd{font-size:.9rem;overflow-wrap:anywhere;min-width:0}
dt{color:var(--muted);font-size:.85rem}
dd{margin:0;font-size:1.35rem;font-variant-numeric:tabular-nums}
figure{margin:0}
figcaption{color:var(--muted);font-size:.9rem;margin-top:6px}
svg{display:block;width:100%;height:auto}
svg text{font-family:system-ui,sans-serif!important}
.narrow{display:none}
.proposal{margin:0 0 8px;font-weight:600}
code{font-family:ui-monospace,monospace}
li{overflow-wrap:anywhere}
ul{margin:0 0 12px;padding-left:20px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.95rem}
th,td{padding:5px 8px;border-bottom:1px solid var(--grid);text-align:right}
td.number{white-space:nowrap}
.words{text-align:left;overflow-wrap:anywhere;min-width:5em}
th{color:var(--muted);font-weight:500;vertical-align:bottom}
@media(max-width:640px){.tiles .proposed{grid-column:1/-1}th,td{padding:5px 4px;font-size:.85rem}}
@media(max-width:640px){main{padding:16px 10px 32px}section{padding:12px 10px}.wide{display:none}.narrow{display:block}}
"""


_CAPTIONS = {
    "norms": (
        "Norm over steps",
        "The norm of the gradients before clipping. Above the dashed line, the step was clipped or skipped: what the "
        "optimizer got has at most the norm of the threshold.",
    ),
    "losses": ("Loss over steps", "The loss that was recorded with each step."),
    "share": (
        "Share of steps clipped or skipped",
        "The share of steps clipped, and on top of it the share skipped, in each part of the run. The scale ends at "
        "the largest share.",
    ),
    "layers": (
        "Layers",
        "Norms before clipping of the layers with the largest medians, largest first. Below them are up to four other "
        "layers that had a spike, a norm above 10 times their median. A column that covers several steps shows the "
        "largest norm. Pink is far above what is usual for the layers. The scale leaves it out, so a spike does not "
        "flatten the other colours. A triangle below is a spike whose layers were not measured.",
    ),
    "histogram": (
        "Distribution of norms",
        "Norms before clipping. Clipped steps are orange, skipped steps violet. The dashed line is the last threshold. "
        "Percentiles cover all steps shown. Norms far from all others are collected in one bar at the end; a line that "
        "lies there too is drawn in it.",
    ),
}
_STATES = {
    "spikes": "above the usual norms, against spikes",
    "level": "the first to try: the usual step is long",
    "leave": "as it is: it does its work",
    "too few": "too few steps to say",
}
_LETTERS = 200  # of a value that the caller gives


def page(shown: Overview, title: str, context: Mapping[str, object] | None = None, date: datetime | None = None) -> str:
    """Return the HTML page of what a monitor recorded, with what the caller says of the run."""
    facts = _facts(shown, context, date or datetime.now().astimezone())
    columns, advice, title = shown.columns, advise(shown.columns), printable(title)
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p class='lead'>{escape(headline(shown))}. "
        "<strong>Every norm on this page is the one before clipping.</strong></p>",
        facts,
        _tiles(shown, advice),
        *(f"<p class='note'>{escape(note)}</p>" for note in notes(shown)),
        *(_pictures(shown) if len(columns.steps) else []),
        *spiked(shown),
        *happened(shown),
        section("A threshold for these norms", advised(advice, shown)),
        *largest_layers(shown),
        section("Percentiles of the norm before clipping", of_percentiles(columns)),
    ]
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        "<meta name='color-scheme' content='light dark'>\n<link rel='icon' href='data:,'>\n"
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _facts(shown: Overview, context: Mapping[str, object] | None, date: datetime) -> str:
    """Return the date, the version, the policy, and what the caller says of the run."""
    if not isinstance(context, Mapping | None):
        raise TypeError(f"context must be a dict of names and values, got {typed(context)}.")
    told = {"written": f"{date:%Y-%m-%d %H:%M %Z}".strip(), "by": version_text()}
    if shown.handling is not None:
        skips = f", skip_above={shown.handling.skip_above:g}" if shown.handling.skips_spikes else ""
        told["policy"] = f'nonfinite="{shown.handling.nonfinite}"{skips}'
    pairs = [
        *told.items(),
        *((cut(str(name), _LETTERS), cut(str(value), _LETTERS)) for name, value in (context or {}).items()),
    ]
    return f"<dl class='facts'>{''.join(_pair(name, value) for name, value in pairs)}</dl>"


def _pair(name: str, value: str, more: str = "", kind: str = "") -> str:
    """Return a name with its value, and in small letters what else is to be said."""
    small = f" <small>{escape(more)}</small>" if more else ""
    return f"<div{kind}><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>"


def _tile(what: str, count: int, steps: int) -> tuple[str, ...]:
    return what, f"{count:,}", percent(count / steps) if count else ""


def _tiles(shown: Overview, advice: Advice) -> str:
    counts, last = shown.counts, shown.last
    threshold = "last threshold" if moves(shown.columns) else "threshold"
    tiles = [
        ("steps", f"{counts.steps:,}"),
        _tile("clipped", counts.num_clipped, counts.steps),
        _tile("skipped", counts.num_skipped, counts.steps),
        (
            "not finite",
            f"{counts.num_nonfinite:,}",
            percent(counts.num_nonfinite / counts.steps) if counts.num_nonfinite else "",
        ),
        ("last norm", number(last.norm) if last else "none"),
        (threshold, number(last.max_norm) if last else "none"),
    ]
    proposed = "none yet" if advice.max_norm is None else f"{advice.max_norm:g}"
    first = _pair("proposed threshold", proposed, _STATES[advice.state], " class='proposed'")
    return f"<dl class='tiles'>{first}{''.join(_pair(*tile) for tile in tiles)}</dl>"


def _pictures(shown: Overview) -> Iterable[str]:
    wide, narrow = svgs(shown, WIDE, 10.4), svgs(shown, NARROW, 4.2)
    for name, drawn in wide.items():
        heading, caption = _CAPTIONS[name]
        label = f" aria-label='{heading}'>"
        both = "".join(
            f"<div class='{kind}'>{svg.replace('>', label, 1)}</div>"
            for kind, svg in (("wide", drawn), ("narrow", narrow[name]))
        )
        yield section(heading, f"<figure>{both}<figcaption>{escape(caption)}</figcaption></figure>")


def notes(shown: Overview) -> list[str]:
    """Return notes on what is easily overlooked or misread."""
    counts, columns = shown.counts, shown.columns
    ordinary = columns.clipped[columns.finite & ~columns.skipped]
    found = []
    if ordinary.size and ordinary.all():
        found.append(
            "100% of the steps that were neither skipped nor NaN were clipped: the threshold set the length of every "
            "gradient. The advice below says what to make of it."
        )
    if counts.steps > counts.num_nonfinite and not counts.num_clipped:
        above = "" if not counts.num_skipped else ", except at skipped steps"
        found.append(f"Nothing was clipped: the norm was never above the threshold{above}.")
    if counts.num_nonfinite:
        found.append(_about_nonfinite(shown))
    if len(columns.steps) < counts.steps:
        found.append(
            f"Pictures and percentiles show the last {len(columns.steps):,} of {counts.steps:,} steps. The counts "
            "cover all steps. To keep more, use a Monitor with a larger capacity."
        )
    return found


def _about_nonfinite(shown: Overview) -> str:
    """Say at how many steps the norm was not finite, and what that did to the gradients as far as steps are kept."""
    counts, columns = shown.counts, shown.columns
    spoiled = int((~columns.finite & ~columns.skipped).sum())
    skipped = int((~columns.finite & columns.skipped).sum())
    number = f"At {counts.num_nonfinite:,} of {counts.steps:,} steps the norm was NaN or infinite."
    if not spoiled and counts.num_skipped:
        if skipped == counts.num_nonfinite == 1:
            return f"{number} That step was skipped: its gradients became zeros."
        known = "They" if skipped == counts.num_nonfinite else "Those that are kept"
        return f"{number} {known} were skipped: their gradients became zeros." if skipped else number
    which = f" {spoiled:,} of those kept were not skipped." if skipped else ""
    if shown.handling is not None and not Nonfinite.named(shown.handling.nonfinite).spoils:
        return f'{number}{which} The last calls had nonfinite="{shown.handling.nonfinite}".'
    return (
        f'{number}{which} With nonfinite="propagate" such a step fills the gradients with NaN; "drop" and "zero" '
        "prevent that."
    )


def about_proposal(shown: Overview, advice: Advice) -> list[str]:
    """Return what the policy of the calls means for a proposed threshold."""
    columns, handling, proposed = shown.columns, shown.handling, advice.max_norm
    found = []
    if moves(columns) and advice.state != "leave":
        found.append(
            "The threshold in use moved from step to step. The proposal is a fixed threshold to compare it with."
        )
    if handling is None:
        return found
    if proposed is not None and handling.skips_spikes:
        found.append(
            f"Steps above {handling.skip_above:g} times the threshold were skipped, not clipped. With the proposal and "
            f"the same skip_above, norms above {handling.skip_above * proposed:.4g} would be skipped."
        )
    if Nonfinite.named(handling.nonfinite).zeroes:
        found.append(
            f'nonfinite="{handling.nonfinite}" was on: a norm covers the finite elements only. A step with NaN looks '
            "ordinary here."
        )
    return found


def moves(columns: Columns) -> bool:
    """Whether the threshold changed between the kept steps."""
    return bool(len(columns.max_norms)) and bool((columns.max_norms != columns.max_norms[0]).any())
