"""The steps to look at: those not finite, skipped or clipped, and the layers responsible."""

from typing import NamedTuple

import numpy as np

from gradclip._src.monitor.records import Columns, Layers, Overview, Step
from gradclip._src.monitor.tables import number

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
