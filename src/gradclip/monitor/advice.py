"""Propose a threshold from the recorded norms, with reasons."""

import math
from dataclasses import dataclass

import numpy as np

from gradclip.monitor.records import Columns

LEAST = 20  # steps
SPIKE = 10.0  # times the median of the earlier steps
_BEFORE = 128  # steps
_AT_ONCE = 10_000  # medians


@dataclass(frozen=True)
class Candidate:
    """A threshold, and what it would have done: the share of steps and the number of spikes it clips."""

    name: str
    max_norm: float
    share_clipped: float
    spikes_clipped: int


@dataclass(frozen=True)
class Advice:
    """A proposed threshold (None if there are too few norms), the reasons, and other thresholds to compare."""

    max_norm: float | None
    reasons: tuple[str, ...]
    candidates: tuple[Candidate, ...] = ()
    steps: int = 0
    spikes: int = 0

    def __str__(self) -> str:
        proposal = "no threshold to propose" if self.max_norm is None else f"max_norm = {self.max_norm:g}"
        rows = [
            f"  {c.name:<20} {c.max_norm:>10.4g}  clips {c.share_clipped:>6.1%} of the steps, "
            f"{c.spikes_clipped} of {self.spikes} spikes"
            for c in self.candidates
        ]
        return "\n".join([proposal, *(f"- {reason}" for reason in self.reasons), *rows])


def advise(columns: Columns) -> Advice:
    """Propose twice the median of the newer half of the norms, or their 90th percentile if that is larger.

    Norms of 0 are left out: no threshold changes them. A spike is a norm more than 10 times the median of the 128 norms
    before it.
    """
    zeros = int((columns.norms == 0).sum())
    columns = columns.of_finite_positive()
    norms = columns.norms.clip(max=1e300)  # a median adds two of them
    if len(norms) < LEAST:
        return Advice(None, (f"A proposal needs {LEAST} steps with a finite norm above 0; there are {len(norms)}.",))
    spikes = norms > SPIKE * medians_before(norms)
    recent = norms[len(norms) // 2 :]
    ordinary = recent[~spikes[len(norms) // 2 :]]
    middle, high = np.percentile(ordinary if ordinary.size else recent, (50, 90)).tolist()
    proposed = _rounded_up(max(2 * middle, high))
    fixed = bool((columns.max_norms == columns.max_norms[-1]).all())
    named = [
        ("proposed", proposed),
        *(
            [("in use" if fixed else "in use at the end", float(columns.max_norms[-1]))]
            if math.isfinite(columns.max_norms[-1])
            else []
        ),
        *((f"{which}%", float(np.percentile(norms, which))) for which in (50, 90, 99)),
    ]
    candidates = tuple(
        Candidate(name, threshold, float((norms > threshold).mean()), int((norms[spikes] > threshold).sum()))
        for name, threshold in named
    )
    reasons = (
        _why(middle, high),
        _what_it_would_do(candidates[0], len(norms), int(spikes.sum())),
        *_about_the_one_in_use(columns),
        *_about_the_level(norms),
        *([f"{zeros:,} steps with a norm of 0 are left out here."] if zeros else []),
        "This says what would have been clipped, not what trains best. A threshold meant to limit every step may be "
        "far lower.",
    )
    return Advice(proposed, reasons, candidates, len(norms), int(spikes.sum()))


def medians_before(norms: np.ndarray) -> np.ndarray:
    """Return for each norm the median of the 128 norms before it; infinity for the first few."""
    found = np.full(len(norms), np.inf)
    few = min(len(norms), _BEFORE)
    for index in range(5, few):
        found[index] = np.median(norms[:index])
    if len(norms) > _BEFORE:
        windows = np.lib.stride_tricks.sliding_window_view(norms, _BEFORE)[:-1]
        # In parts: the median copies its windows, which take a hundred times the memory of the norms.
        for start in range(0, len(windows), _AT_ONCE):
            part = np.median(windows[start : start + _AT_ONCE], axis=1)
            found[_BEFORE + start : _BEFORE + start + len(part)] = part
    return found


def _why(middle: float, high: float) -> str:
    if high > 2 * middle:
        return (
            f"The norms are spread widely: in the newer half, 10% are above {high:.3g}, more than twice the median "
            f"{middle:.3g}. The proposal leaves nine of ten ordinary steps unclipped."
        )
    return f"It is twice the median of the newer half, {middle:.3g}, so ordinary steps stay unclipped."


def _what_it_would_do(candidate: Candidate, steps: int, spikes: int) -> str:
    caught = f"{candidate.spikes_clipped} of {spikes} spikes" if spikes else "there were no spikes"
    return (
        f"It would have clipped {candidate.share_clipped:.1%} of {steps:,} steps; {caught} "
        f"(norms above {SPIKE:g} times the median of the {_BEFORE} before)."
    )


def _about_the_one_in_use(columns: Columns) -> list[str]:
    clipped, skipped = columns.clipped, columns.skipped
    left_out = f" {skipped.sum():,} steps were skipped." if skipped.any() else ""
    if clipped.any() and (clipped | skipped).all():
        return [
            "Every step was clipped. The threshold then sets the length of every gradient: with SGD it acts as part of "
            "the learning rate, and with Adam it changes little except the relative weight of the steps." + left_out
        ]
    if not clipped.any() and skipped.any():
        return [f"No step was clipped.{left_out}"]
    if not clipped.any():
        return [f"Clipping never fired: the largest norm was {columns.norms.max():.3g}."]
    which = "The threshold in use" if (columns.max_norms == columns.max_norms[-1]).all() else "The thresholds in use"
    return [f"{which} clipped {clipped.mean():.1%} of these steps.{left_out}"]


def _about_the_level(norms: np.ndarray) -> list[str]:
    quarter = max(1, len(norms) // 4)
    first, last = float(np.median(norms[:quarter])), float(np.median(norms[-quarter:]))
    low, high = sorted((first, last))
    if high <= 3 * low:
        return []
    return [
        f"The level moved: the median norm was {first:.3g} in the first quarter and {last:.3g} in the last. A fixed "
        "threshold fits only one of them. A threshold that follows the norms fits both."
    ]


def _rounded_up(number: float) -> float:
    """Round a number up to two significant digits."""
    if not 1e-300 < number < 1e300:
        return number
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return float(f"{math.ceil(number / unit * (1 - 1e-12)) * unit:.2g}")
