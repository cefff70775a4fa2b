"""Find the steps that were skipped, or whose gradients were far larger or not finite, and who made them so."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np

from gradclip._src.monitor.advice import SPIKE
from gradclip._src.monitor.pending import FetchedStep
from gradclip._src.monitor.records import LayerOfSpike, Layers, Spike

WINDOW = 128  # norms before
LEAST = 5  # norms before
ABOVE = 2.0  # times its usual norm


class Spikes:
    """The spikes to keep: of those with finite norms the largest, of the others the last.

    Of several steps in a row that are not finite, only the first is kept.
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self._kept: list[Spike] = []
        self._norms: deque[float] = deque()
        self._sorted: list[float] = []
        self._layers: deque[tuple[int, Layers]] = deque(maxlen=WINDOW)
        self._broken = False  # whether the last step was not finite

    def kept(self) -> list[Spike]:
        """Return the spikes, in the order of their steps."""
        return list(self._kept)

    def plain(self) -> dict[str, Any]:
        """Return what a copy takes over, copied."""
        return {name: copy(value) for name, value in vars(self).items()}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> "Spikes":
        """Return a copy that goes on by itself."""
        made = cls(plain["keep"])
        vars(made).update(plain)
        return made

    def see(self, steps: Sequence[FetchedStep]) -> None:
        """Look at steps, in their order."""
        if not self.keep:
            return
        for seen in steps:
            spike = self._spike(seen, self._level())
            if spike is not None and (spike.finite or not self._broken):
                self._take(spike)
            self._broken = spike is not None and not spike.finite
            if seen.layers is not None:
                self._layers.append((seen.step.step, seen.layers))
            self._follow(seen.step.norm)

    def restart(self, steps: Sequence[FetchedStep], spikes: Sequence[Spike] | None) -> None:
        """Forget all, and go on after these steps, with these spikes; None for those among the steps."""
        self._kept, self._broken = [], False
        self._norms.clear()
        self._sorted.clear()
        self._layers.clear()
        self.see(steps)
        if spikes is not None:
            self._kept = []
            for spike in spikes if self.keep else ():
                self._take(spike)

    def _level(self) -> float:
        """Return the median of the norms before, infinity if there are too few."""
        count, middle = len(self._sorted), len(self._sorted) // 2
        if count < LEAST:
            return math.inf
        return (self._sorted[middle] + self._sorted[-1 - middle]) / 2

    def _follow(self, norm: float) -> None:
        """Take a norm into account for the next steps."""
        if not 0.0 < norm < math.inf:
            return
        if len(self._norms) == WINDOW:
            self._sorted.pop(bisect_left(self._sorted, self._norms.popleft()))
        # A median adds two norms.
        self._norms.append(min(norm, 1e300))
        insort(self._sorted, self._norms[-1])

    def _spike(self, seen: FetchedStep, level: float) -> Spike | None:
        step = seen.step
        broken = not step.finite or (seen.layers is not None and not np.isfinite(seen.layers.norms).all())
        if not (broken or step.skipped or step.norm > SPIKE * level):
            return None
        return Spike(
            step.step,
            step.norm,
            level if math.isfinite(level) else math.nan,
            step.loss,
            seen.context,
            () if seen.layers is None else self._ranked(step.step, seen.layers),
            step.max_norm,
            step.skipped,
            seen.missed,
        )

    def _ranked(self, step: int, layers: Layers) -> tuple[LayerOfSpike, ...]:
        """Return the layers with the first causes first."""
        before = [(number, past.norms) for number, past in self._layers if past.names == layers.names]
        norms = layers.norms.astype(np.float64)
        table = np.array([past for _, past in before], np.float64).reshape(-1, len(norms))
        scale = float(np.max(norms, where=np.isfinite(norms), initial=0.0)) or 1.0
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # infinity is as good as what is beyond
            usual = _medians(table)
            squares = (norms / scale) ** 2
            grown = np.where(np.isfinite(norms), squares - np.nan_to_num(usual / scale) ** 2, np.inf)
            shares, times = squares / squares.sum(), np.where(usual > 0, norms / usual, np.nan)
        since = _since(step, [number for number, _ in before], table, usual)
        columns = zip(layers.names, norms.tolist(), shares.tolist(), times.tolist(), since, strict=True)
        found = [LayerOfSpike(*row) for row in columns]
        return tuple(found[index] for index in np.argsort(-grown, kind="stable").tolist())

    def _take(self, spike: Spike) -> None:
        """Keep a spike, and drop one of its kind if there are too many."""
        alike = [one for one in self._kept if one.finite == spike.finite]
        self._kept.append(spike)
        if len(alike) >= self.keep:
            worst = min([*alike, spike], key=lambda one: (one.times if one.finite and one.level > 0 else 0.0, one.step))
            self._kept = [one for one in self._kept if one is not worst]
        self._kept.sort(key=lambda one: one.step)


def _medians(table: np.ndarray) -> np.ndarray:
    """Return the median of the finite numbers in each column; NaN without any."""
    found = [column[np.isfinite(column)] for column in table.T]
    return np.array([np.median(column) if column.size else np.nan for column in found])


def _since(step: int, numbers: Sequence[int], table: np.ndarray, usual: np.ndarray) -> list[int]:
    """Return for each column the first step of those in a row, up to `step`, that are above the usual norm."""
    above = ~(table <= ABOVE * usual)  # also what is not finite
    found = []
    for column in above.T:
        calm = np.flatnonzero(~column)
        first = int(calm[-1]) + 1 if calm.size else 0
        found.append(numbers[first] if first < len(numbers) else step)
    return found
