"""What a log shows: how often the run clipped, its spikes, and a proposal."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from gradclip._src.logs.rows import Log, Row, counted, in_order, numbered
from gradclip._src.monitor.advice import Advice, advise
from gradclip._src.monitor.page.tables import percent
from gradclip._src.monitor.pending import FetchedStep
from gradclip._src.monitor.records import Columns, Counts, Overview, Spike, Step, percentiles
from gradclip._src.monitor.spikes import Spikes
from gradclip._src.monitor.wording import NO_LOSS, RECORD

_SPIKES = 5
_AT_THE_TOP, _NEAR, _ENOUGH = 0.1, 5e-4, 20
_OF_COMMON = (0.1, 0.3, 1.0, 3.0, 10.0)
_SCALED = 1024
"""How many times the threshold norms are that GradScaler has probably scaled: it starts at 65,536."""
_UNSCALE = (
    "The usual norm is {:.3g} times the threshold: the gradients were probably still multiplied by GradScaler's scale. "
    "Call scaler.unscale_(optimizer) before clipping, and log the norm after it. If they were not, lower the learning "
    "rate: no threshold is proposed."
)
_WITHOUT_LOSS = f"{NO_LOSS} Log it beside the norm, as an entry with the name loss."


class Summary(NamedTuple):
    """What a log shows.

    Attributes:
        assumed: whether the threshold is a default of the program that wrote the log.
        repeated: how many rows a later row of the same step has replaced.
        until: the step of the last row of the log.
        unnumbered: how many rows have no step, and were left out; -1 if the steps are the places of the rows.

    """

    log: Log
    steps: Sequence[Step]
    counts: Counts
    spikes: Sequence[Spike]
    advice: Advice
    max_norm: float
    assumed: bool
    repeated: int
    until: int
    unnumbered: int

    @classmethod
    def of(cls, log: Log, max_norm: float | None = None) -> "Summary":
        """Summarize a log. `max_norm` is the threshold of the run, if the user says it."""
        with_steps, unnumbered = numbered(log.rows)
        rows, repeated = in_order(with_steps)
        until = with_steps[-1].step or 0
        default = log.max_norm if max_norm is None else max_norm
        own = _thresholds(rows, default, own=max_norm is None)
        steps = [
            Step(row.step or 0, row.norm, threshold, row.skipped, None, row.loss)
            for row, threshold in zip(rows, own, strict=True)
        ]
        found = Spikes(_SPIKES)
        for step in steps:
            found.see((FetchedStep(step, None),))
        assumed = log.assumed and max_norm is None
        advice = _of_a_log(advise(Columns.of(steps)), _scale(steps))
        return cls(
            log, steps, Counts().plus(steps), found.kept(), advice, own[-1], assumed, repeated, until, unnumbered
        )

    @property
    def columns(self) -> Columns:
        """The steps as arrays."""
        return Columns.of(self.steps)

    @property
    def gap(self) -> int:
        """The usual number of steps from one logged step to the next."""
        numbers = np.array([step.step for step in self.steps])
        return int(np.median(np.diff(numbers))) if len(numbers) > 1 else 1

    @property
    def overview(self) -> Overview:
        """What the picture shows."""
        return Overview.of(self.steps, self.counts, 0, self.spikes)

    def lines(self) -> list[str]:
        """Return it as lines of text."""
        first, last = self.steps[0].step, self.steps[-1].step
        every = f", one of every {self.gap:,}" if self.gap > 1 else ""
        steps = "1 step" if len(self.steps) == 1 else f"{len(self.steps):,} steps from {first:,} to {last:,}{every}"
        return [
            f"{self.log.kind}: {steps}.",
            *self.notes(),
            "",
            *self._clipping(),
            *map(str, self.spikes),
            "",
            str(self.advice),
        ]

    def notes(self) -> list[str]:
        """Return sentences on how to read the log."""
        found = [f"The norms were measured {self.log.measured}."] if self.log.measured else []
        if not self.log.measured:
            found.append("The log does not say whether the norms were measured before clipping, which is assumed.")
        if self.gap > 1:
            found.append("The steps that were not logged are unknown: shares are those of the logged steps.")
        if self.repeated:
            times = counted(self.repeated, "step was logged", "steps were logged")
            found.append(f"{times} again later, as after a restart or by another process: the last counts.")
        if self.repeated and self.until < self.steps[-1].step:
            found.append(f"The last run in the log ends at step {self.until:,}: later steps are of a run before.")
        if self.unnumbered < 0:
            found.append("The log numbers no steps, or not most: its norms are counted instead.")
        if self.unnumbered > 0:
            found.append(
                counted(self.unnumbered, "norm has no step: it is", "norms have no step: they are") + " left out."
            )
        return found + list(self.log.notes) + self._at_the_top()

    def _at_the_top(self) -> list[str]:
        """Say so if the norms look as if they were logged after clipping."""
        norms = np.array([step.norm for step in self.steps if step.finite])
        if len(norms) < _ENOUGH or not norms.max() > 0:
            return []
        top = float(norms.max())
        share = float((norms >= top * (1 - _NEAR)).mean())
        if share < _AT_THE_TOP or (self.log.measured and not math.isclose(top, self.max_norm, rel_tol=_NEAR)):
            return []
        equal = f"{percent(share)} of the norms equal the largest, {top:.4g}"
        after = "so the run's spikes cannot be seen."
        if self.log.measured:
            return [f"Yet {equal}, which is max_norm: something had probably clipped the gradients before, {after}"]
        return [f"{equal}: they were probably logged after clipping, {after}"]

    def _clipping(self) -> list[str]:
        norms = np.array([step.norm for step in self.steps])
        few = percentiles(norms, (1, 50, 99))
        spread = ", ".join(f"{value:.4g} ({which}%)" for which, value in few.items())
        found = [f"Percentiles of the norms: {spread}."] if few else []
        if self.counts.num_nonfinite:
            found.append(counted(self.counts.num_nonfinite, "norm is", "norms are") + " NaN or infinite.")
        if math.isinf(self.max_norm):
            above = ", ".join(f"{percent(float((norms > one).mean()))} above {one:g}" for one in _OF_COMMON)
            return [*found, f"The run's threshold is not known: say it with --max-norm. Of the norms, {above}."]
        how = f" {self.max_norm:g} is the program's default: say another with --max-norm." if self.assumed else ""
        clipped = (
            f"{self.counts.num_clipped:,} of {self.counts.steps:,} logged steps ({percent(self.counts.clipped_share)})"
        )
        own = [step.max_norm for step in self.steps]
        varied = f", the last of thresholds from {min(own):g} to {max(own):g}" if min(own) < max(own) else ""
        return [*found, f"Clipped: {clipped}, with max_norm = {self.max_norm:g}{varied}.{how}"]

    def plain(self) -> dict[str, Any]:
        """Return it as dicts, lists and numbers."""
        return {
            "format": self.log.kind,
            "measured": self.log.measured or None,
            "first_step": self.steps[0].step,
            "last_step": self.steps[-1].step,
            "logged_every": self.gap,
            **self.counts._asdict(),
            "clipped_share": self.counts.clipped_share,
            "max_norm": self.max_norm,
            "max_norm_is_assumed": self.assumed,
            "percentiles": {str(which): value for which, value in percentiles(self.columns.norms).items()},
            "spikes": [{"step": s.step, "norm": s.norm, "level": s.level, "loss": s.loss} for s in self.spikes],
            "advice": {
                "state": self.advice.state,
                "max_norm": self.advice.max_norm,
                "try_values": list(self.advice.try_values),
                "proposal": self.advice.proposal,
                "reasons": list(self.advice.reasons),
                "candidates": [vars(one) for one in self.advice.candidates],
            },
            "notes": self.notes(),
        }


def _thresholds(rows: Sequence[Row], default: float, *, own: bool) -> list[float]:
    """Return the threshold of each row: its own, if rows may have one, else the last one before it, or the default."""
    found, last = [], math.inf if math.isnan(default) else default
    for row in rows:
        if own and not math.isnan(row.max_norm):
            last = row.max_norm
        elif row.norm > last and math.isnan(default):
            last = math.inf  # it was not clipped, so its threshold was higher
        found.append(last)
    return found


def _scale(steps: Sequence[Step]) -> float:
    """Return how many times the threshold the usual norm is."""
    shares = [step.norm / step.max_norm for step in steps if step.finite and 0 < step.max_norm < math.inf]
    return float(np.median(shares)) if len(shares) >= _ENOUGH else 0.0


def _of_a_log(advice: Advice, scale: float) -> Advice:
    """Return advice to somebody who has a log, where that to the user of a monitor does not help."""
    if scale >= _SCALED:
        return replace(
            advice,
            max_norm=None,
            try_values=(),
            candidates=(),
            state="too few",
            reasons=(),
            proposal=_UNSCALE.format(scale),
        )
    return replace(advice, reasons=tuple(_WITHOUT_LOSS if one == RECORD else one for one in advice.reasons))
