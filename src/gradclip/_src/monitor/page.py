"""The report: one self-contained HTML page, light or dark, for screens of 400 pixels and wider."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from html import escape

from gradclip._src.monitor.advice import Advice, advise
from gradclip._src.monitor.notes import moves, notes
from gradclip._src.monitor.picture import NARROW, WIDE, headline, svgs
from gradclip._src.monitor.records import Overview, printable
from gradclip._src.monitor.sections import advised, happened, largest_layers, of_percentiles, spiked
from gradclip._src.monitor.style import STYLE
from gradclip._src.monitor.tables import cut, number, percent, section
from gradclip._src.versions import version_text
from gradclip._src.words import typed

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


def _tiles(shown: Overview, advice: Advice) -> str:
    counts, last = shown.counts, shown.last
    threshold = "last threshold" if moves(shown.columns) else "threshold"
    tiles = [
        ("steps", f"{counts.steps:,}"),
        ("clipped", f"{counts.clipped:,}", percent(counts.share_clipped) if counts.clipped else ""),
        ("skipped", f"{counts.skipped:,}", percent(counts.skipped / counts.steps) if counts.skipped else ""),
        ("not finite", f"{counts.nonfinite:,}", percent(counts.nonfinite / counts.steps) if counts.nonfinite else ""),
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
