"""The sections of the page that are tables and text."""

from collections.abc import Iterable
from html import escape

from gradclip._src.monitor.advice import Advice
from gradclip._src.monitor.events import NotableStep, events
from gradclip._src.monitor.notes import about_proposal
from gradclip._src.monitor.records import Columns, Counts, Overview, percentiles, printable
from gradclip._src.monitor.tables import number, percent, section, table, times


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
    kinds = ((counts.nonfinite, "not finite"), (counts.skipped, "skipped"), (counts.clipped, "clipped"))
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
        (c.name, number(c.max_norm), percent(c.share_clipped), f"{c.spikes_clipped} of {advice.spikes}")
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
