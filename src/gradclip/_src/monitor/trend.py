"""What losses and norms did over the kept steps: whether the loss fell, and whether the level of the norms held."""

import math
from typing import Literal, NamedTuple

import numpy as np

from gradclip._src.monitor.records import Columns

LEAST = 20  # steps
SPIKE = 10.0  # times the median of the earlier steps
BEFORE = 128  # steps
_AT_ONCE = 10_000  # medians
_PARTS, _IN_A_PART = 20, 5
_SIZEABLE = 0.05  # of the size of the losses
_MUCH_OF_THE_FALL = 1 / 3
FAR_RISEN = 3.0  # times
_RISEN, _WILD, _COLLAPSED = 2.0, 10.0, 30.0  # times
_STILL = 1.1  # times the quarter before

Kind = Literal["unknown", "fell", "rose", "rebounded", "flat"]


class Losses(NamedTuple):
    """What the loss did: its medians at the start, in the best part and at the end, and the last step of that part.

    `recorded` is the number of steps with a finite loss.
    """

    kind: Kind
    start: float = math.nan
    best: float = math.nan
    end: float = math.nan
    best_until: int = 0
    recorded: int = 0

    @property
    def bad(self) -> bool:
        """Whether the loss is above its start, or lost much of what it had fallen."""
        return self.kind in ("rose", "rebounded")

    @classmethod
    def of(cls, columns: Columns) -> "Losses":
        """Judge the finite losses; "unknown" if there are fewer than 20.

        All comparisons are of medians, so single bad batches change nothing. A difference counts if it is larger than
        three standard errors of the medians, and than 5% of the losses themselves. Noise is judged by the differences
        between neighbours, which a trend hardly changes. Infinite losses count if they are the last that were recorded,
        and at least 5.
        """
        recorded = np.isfinite(columns.losses)
        losses, steps = columns.losses[recorded].clip(-1e300, 1e300), columns.steps[recorded]
        if len(losses) < LEAST:
            return cls("unknown", recorded=len(losses))
        few, many = max(_IN_A_PART, len(losses) // 50), max(_IN_A_PART, len(losses) // 4)
        start, end = float(np.median(losses[:few])), float(np.median(losses[-many:]))
        medians = [float(np.median(part)) for part in _parts(losses)]
        best, place = min(medians), _parts(np.arange(len(losses)))[int(np.argmin(medians))]
        noise = _noise(losses)
        sizeable = _SIZEABLE * max(abs(start), abs(best))
        margin = max(_margin(noise, few, many), sizeable)
        # The best of 20 medians of noise alone is already two standard errors below the usual one.
        back = max(5 * 1.25 * noise * len(place) ** -0.5, sizeable, _MUCH_OF_THE_FALL * (start - best))
        early = float(np.median(losses[:many]))
        kind: Kind = "flat"
        if _infinite_at_last(columns.losses):
            kind, end = "rose", math.inf
        elif end > start + margin:
            kind = "rose"
        elif end > best + back:
            kind = "rebounded"
        elif end < start - margin or (
            end < start - sizeable and end < early - max(_margin(noise, many, many), sizeable)
        ):
            kind = "fell"
        return cls(kind, start, best, end, int(steps[place[-1]]), len(losses))


def _noise(values: np.ndarray) -> float:
    """Return the standard deviation of noise around a trend, from the differences between neighbours."""
    return 1.4826 * float(np.median(np.abs(np.diff(values)))) / math.sqrt(2)


def _margin(noise: float, few: int, many: int) -> float:
    """Return three standard errors of the difference between the medians of so many values."""
    return 3 * 1.25 * noise * math.hypot(few**-0.5, many**-0.5)


def _infinite_at_last(losses: np.ndarray) -> bool:
    """Say whether at least 5 losses are infinite after the last finite one; those not recorded do not matter."""
    return int((losses[np.flatnonzero(np.isfinite(losses))[-1] :] == math.inf).sum()) >= _IN_A_PART


class Level(NamedTuple):
    """The level of the finite norms above 0, without spikes.

    `middle`, `low` and `high` are the median and the 10th and 90th percentile of the newer half; `first` the median of
    the first 5 steps, `last` that of the last quarter, `before` that of the quarter before it, `top` the largest of 20
    parts, `healthy` that of the steps until the loss was best. `noise` is the factor by which noise alone may tell the
    first norms from the last ones.
    """

    middle: float
    low: float
    high: float
    first: float
    last: float
    top: float
    healthy: float
    before: float = math.nan
    noise: float = 1.0

    @property
    def rise(self) -> float:
        """How many times the first norms the last ones are."""
        return self.last / self.first

    @property
    def risen(self) -> bool:
        """Whether the norms rose, by more than noise explains."""
        return self.rise >= max(_RISEN, self.noise)

    @property
    def far_risen(self) -> bool:
        """Whether the norms rose far, by more than noise explains."""
        return self.rise >= max(FAR_RISEN, self.noise)

    @property
    def rising(self) -> bool:
        """Whether the norms rose far and still do: a level that rose and then held is a level."""
        return self.far_risen and self.last >= _STILL * self.before

    @property
    def unsteady(self) -> bool:
        """Whether the norms rose or spread so far that they alone leave open if the level is healthy."""
        return self.risen or (self.high >= _WILD * self.low and not self.fallen_far)

    @property
    def moved(self) -> bool:
        """Whether the norms rose, or fell to almost nothing: next to a loss that stands still, both are bad signs."""
        return self.risen or self.fallen_far

    @property
    def fallen_far(self) -> bool:
        """Whether the norms fell to almost nothing of the first ones."""
        return self.rise <= 1 / _COLLAPSED

    @property
    def guard(self) -> float:
        """A threshold that ordinary steps do not reach, old or new, with room for a level that rises a little."""
        room = self.rise if 1 < self.rise < FAR_RISEN else 1.0
        return max(2 * self.middle * room, self.high * room, self.top)

    @classmethod
    def of(cls, columns: Columns, spikes: np.ndarray, losses: Losses) -> "Level":
        """Measure it; `spikes` says which of the steps are spikes. Needs a norm."""
        norms, steps = columns.norms[~spikes].clip(1e-300, 1e300), columns.steps[~spikes]
        low, middle, high = np.percentile(norms[len(norms) // 2 :], (10, 50, 90)).tolist()
        first = float(np.median(norms[:_IN_A_PART]))
        until = max(_IN_A_PART, int((steps <= losses.best_until).sum()))
        healthy = float(np.median(norms[:until])) if losses.bad else min(first, middle)
        healthy = first if healthy < first / _COLLAPSED else healthy
        quarter = max(1, len(norms) // 4)
        last, before = float(np.median(norms[-quarter:])), float(np.median(norms[-2 * quarter :][:quarter]))
        top = max(float(np.median(part)) for part in _parts(norms))
        noise = math.exp(min(_margin(_noise(np.log(norms)), _IN_A_PART, quarter), 600.0)) if len(norms) > 1 else 1.0
        return cls(middle, low, high, first, last, top, healthy, before, noise)


def _parts(values: np.ndarray) -> list[np.ndarray]:
    """Split values into 20 parts, or fewer if they would have fewer than 5."""
    return np.array_split(values, max(1, min(_PARTS, len(values) // _IN_A_PART)))


def lost_from(columns: Columns) -> int | None:
    """Return the step from which on all norms are NaN or infinite, if there are at least 5 of them."""
    finite = np.flatnonzero(columns.finite)
    after = int(finite[-1]) + 1 if finite.size else 0
    return int(columns.steps[after]) if len(columns.steps) - after >= _IN_A_PART else None


def spikes_in(norms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which of the positive finite norms are spikes, and the norm above which each would be one."""
    clipped = norms.clip(max=1e300)  # a median adds two of them
    most = SPIKE * medians_before(clipped)
    return clipped > most, most


def medians_before(norms: np.ndarray) -> np.ndarray:
    """Return for each norm the median of the 128 norms before it; infinity for the first few."""
    found = np.full(len(norms), np.inf)
    few = min(len(norms), BEFORE)
    for index in range(5, few):
        found[index] = np.median(norms[:index])
    if len(norms) > BEFORE:
        windows = np.lib.stride_tricks.sliding_window_view(norms, BEFORE)[:-1]
        # In parts: the median copies its windows, which take a hundred times the memory of the norms.
        for start in range(0, len(windows), _AT_ONCE):
            part = np.median(windows[start : start + _AT_ONCE], axis=1)
            found[BEFORE + start : BEFORE + start + len(part)] = part
    return found
