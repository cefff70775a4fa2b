"""Say from recorded norms, losses and thresholds whether clipping helps, and which thresholds to try."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gradclip._src.monitor import wording
from gradclip._src.monitor.records import Columns
from gradclip._src.monitor.trend import FAR_RISEN, LEAST, SPIKE, Level, Losses, lost_from, spikes_in
from gradclip._src.public import record

State = Literal["spikes", "level", "leave", "too few"]
_TINY = 1e-300  # thresholds below it stop training
_MANY_CLIPPED = 0.1  # of the steps that are no spikes
_NEXT_TO_NOTHING = 1e-3  # of the norms
_FAR_ABOVE = 0.2  # of the loss at the start


@record
@dataclass(frozen=True)
class Candidate:
    """A threshold, and what it would have done: the share of steps and the number of spikes it clips."""

    name: str
    max_norm: float
    clipped_share: float
    spikes_clipped: int


@record
@dataclass(frozen=True)
class Advice:
    """What a monitor makes of the recorded steps. Print it for all of it.

    Attributes:
        max_norm: the threshold to use or to try first; None if there are too few steps. With "leave", the one in use,
            or the last one if it moves.
        reasons: sentences on what was seen, and why this follows.
        candidates: thresholds to compare, with the share of the recorded steps that each would have clipped.
        steps: the number of steps with a finite norm above 0.
        spikes: the number of those with a norm more than 10 times the median of the 128 before.
        state: "spikes": the level of the norms is healthy, and a threshold above it guards against spikes. "level":
            the usual step is too long, or may be: clip every step, or lower the learning rate. "leave": the threshold
            in use does its work. "too few": there are too few steps to say.
        proposal: the first line: the state and what to do, as a sentence.
        try_values: thresholds to train with, in this order, if you can afford to compare; empty with "too few".

    """

    max_norm: float | None
    reasons: tuple[str, ...]
    candidates: tuple[Candidate, ...] = ()
    steps: int = 0
    spikes: int = 0
    state: State = "too few"
    proposal: str = "Too few steps to say: no threshold to propose."
    try_values: tuple[float, ...] = ()

    def __str__(self) -> str:
        rows = [
            f"  {c.name:<20} {c.max_norm:>10.4g}  clips {c.clipped_share:>6.1%} of the steps"
            + (f", {c.spikes_clipped} of {self.spikes} spikes" if self.spikes else "")
            for c in self.candidates
        ]
        return "\n".join([self.proposal, *(f"- {reason}" for reason in self.reasons), *rows])


@dataclass(frozen=True)
class _Evidence:
    """What the steps with a finite norm above 0 show. `in_use` is the last threshold, NaN if it never clips.

    `let_through` says which spikes were neither skipped nor clipped to less than a spike.
    """

    columns: Columns
    spikes: np.ndarray
    let_through: np.ndarray
    losses: Losses
    level: Level
    lost: int | None
    in_use: float
    moving: bool

    @classmethod
    def of(cls, everything: Columns, columns: Columns) -> "_Evidence":
        spikes, most = spikes_in(columns.norms)
        let_through = spikes & (columns.max_norms > most) & ~columns.skipped
        losses = Losses.of(everything)
        level = Level.of(columns, spikes, losses)
        thresholds = everything.max_norms[np.isfinite(everything.max_norms) & (everything.max_norms > 0)]
        last = float(everything.max_norms[-1])
        in_use = last if _TINY < last < math.inf else math.nan
        moving = thresholds.size > 0 and bool((thresholds != thresholds[0]).any())
        return cls(columns, spikes, let_through, losses, level, lost_from(everything), in_use, moving)

    @property
    def share(self) -> float:
        """The share of the steps that are no spikes at which the threshold clipped."""
        return float(self.columns.clipped[~self.spikes].mean())

    @property
    def bad(self) -> bool:
        """Whether the loss rose, or stood still while the norms moved far, or the run ended in NaN."""
        return self.losses.bad or self.lost is not None or (self.losses.kind == "flat" and self.level.moved)

    @property
    def stuck(self) -> bool:
        """Whether the loss stood still while the threshold left almost nothing of the gradients."""
        return self.losses.kind == "flat" and self.in_use < _NEXT_TO_NOTHING * self.level.healthy

    @property
    def ended_at(self) -> int | None:
        """The step with the first spike let through, or the first of the norms that stay NaN, if the run is bad."""
        at = self.columns.steps[self.let_through][:1].tolist() + ([] if self.lost is None else [self.lost])
        return min(at, default=None) if self.bad else None


def advise(columns: Columns) -> Advice:
    """Tell four states apart from norms, losses and thresholds, and propose thresholds to try.

    Norms of 0 are left out: no threshold changes them. A spike is a norm more than 10 times the median of the 128 norms
    before it. At least 20 finite norms above 0 are needed, or one before all others are NaN or infinite.
    """
    counted = columns.of_finite_positive()
    if len(counted.norms) < (1 if lost_from(columns) else LEAST):
        few = wording.too_few(LEAST, len(counted.norms))
        return Advice(None, (few, *wording.on_tiny(columns), *wording.on_policy(columns)))
    seen = _Evidence.of(columns, counted)
    state, proposal, reasons, values = _judged(seen)
    rounded = (value if value == seen.in_use else rounded_up(value) for value in values if 0 < value < math.inf)
    values = tuple(dict.fromkeys(rounded))
    return Advice(
        values[0],
        (*reasons, *wording.on_record(columns)),
        _candidates(seen, state, values),
        len(counted.norms),
        int(seen.spikes.sum()),
        state,
        proposal(values),
        values,
    )


def _judged(seen: _Evidence) -> tuple[State, wording.Proposal, tuple[str, ...], tuple[float, ...]]:
    """Return the state, what makes the first line of the values, the reasons, and the values before rounding."""
    level, losses, guard = seen.level, seen.losses, seen.level.guard
    said = (wording.on_losses(losses), wording.on_level(level), wording.on_spikes(int(seen.spikes.sum())))
    clipped = wording.on_clipping(seen.share, seen.in_use, seen.moving)
    if (ended := _one_bad_step(seen)) is not None:
        step, level = ended
        reasons = (wording.before(step, level), *said)
        if seen.in_use <= level.guard and step == seen.lost:
            return "leave", wording.one_bad_step_at(seen.moving), (*reasons, *clipped), (seen.in_use,)
        return "spikes", wording.one_bad_step(step == seen.lost), reasons, _from(level.guard)
    if seen.bad:
        exploded = seen.lost is not None or level.unsteady or level.moved
        first = wording.clip_every_step if exploded else wording.lower_the_rate
        return "level", first, (*said, *clipped, wording.ON_RATES), _below(seen)
    if seen.share >= _MANY_CLIPPED and seen.in_use > 0 and not seen.stuck:
        values = (seen.in_use, 3 * seen.in_use, seen.in_use / 3) if losses.kind == "flat" else (seen.in_use,)
        return "leave", wording.leave(seen.moving), (*said, *clipped, wording.on_leaving(losses)), values
    if losses.kind == "unknown" and level.unsteady:
        values = (level.healthy / 3, level.healthy / 10, guard)
        return "level", wording.perhaps_too_long, (*said, *clipped, wording.ON_RATES), values
    if losses.kind == "fell" and level.rising:
        return "level", wording.rising, (*said, *clipped), (level.middle, guard, level.middle / 3)
    if ((seen.moving and seen.in_use > 0) or level.middle <= seen.in_use < SPIKE * level.middle) and not seen.stuck:
        return "leave", wording.leave(seen.moving), (*said, *clipped), (seen.in_use,)
    more = (wording.STUCK,) if seen.stuck else ()
    if level.fallen_far and guard > FAR_RISEN * 2 * level.last:
        return "spikes", wording.guards(losses), (*said, *clipped, *more), (guard, 2 * level.last)
    return "spikes", wording.guard(losses, held=level.far_risen), (*said, *clipped, *more), _from(guard)


def _one_bad_step(seen: _Evidence) -> tuple[int, Level] | None:
    """Return the step that ended the run and the level before it, if all was well until then."""
    step, columns = seen.ended_at, seen.columns
    if step is None:
        return None
    early = columns.steps < step
    before = Columns(*(column[early] for column in columns))
    losses = Losses.of(before)
    if early.sum() < LEAST or losses.bad:
        return None
    level = Level.of(before, seen.spikes[early], losses)
    return None if level.unsteady else (step, level)


def _from(guard: float) -> tuple[float, ...]:
    return guard, guard / 2, guard / 6


def _below(seen: _Evidence) -> tuple[float, ...]:
    """Return thresholds far below the level that the norms had while the loss was still falling."""
    base, losses = seen.level.healthy, seen.losses
    if seen.lost is not None:  # norms may have exploded from the second step on
        base = min(base, float(seen.columns.norms[0]))
    if seen.in_use > 0 and seen.share >= 0.5:
        return tuple(min(base, seen.in_use) / by for by in (3, 10, 30))
    far = seen.lost is not None or losses.end - losses.start > _FAR_ABOVE * abs(losses.start)
    return tuple(base / by for by in ((10, 30, 3) if far else (3, 10, 1)))


def _candidates(seen: _Evidence, state: State, values: tuple[float, ...]) -> tuple[Candidate, ...]:
    norms = seen.columns.norms
    names = ("first", "second", "third")
    named = [(f"to try {name}", value) for name, value in zip(names, values, strict=False)]
    if state == "leave":
        named[0] = ("in use at the end" if seen.moving else "in use", values[0])
    elif seen.in_use > 0:
        named.append(("in use at the end" if seen.moving else "in use", seen.in_use))
    named += [(f"{which}%", float(np.percentile(norms, which))) for which in (50, 90, 99)]
    of_spikes = norms[seen.spikes]
    return tuple(Candidate(name, to, float((norms > to).mean()), int((of_spikes > to).sum())) for name, to in named)


def rounded_up(number: float) -> float:
    """Round a number up to two significant digits."""
    if not 1e-300 < number < 1e300:
        return number
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return float(f"{math.ceil(number / unit * (1 - 1e-12)) * unit:.2g}")
