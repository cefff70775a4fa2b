"""Records of one step and of many, in plain numbers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gradclip._src.monitor.spike import Spike

TINY = 1e-6
"""With coefficients below it, an optimizer may lose the gradients."""


class Layers(NamedTuple):
    """The layer norms before clipping, in float32 if it can hold them, and the unique names of the layers."""

    names: tuple[str, ...]
    norms: np.ndarray

    def top(self, count: int) -> dict[str, float]:
        """Return the largest norms, largest first; NaN counts as the largest."""
        order = np.argsort(-np.where(np.isnan(self.norms), np.inf, self.norms), kind="stable")[:count]
        return {self.names[index]: float(self.norms[index]) for index in order.tolist()}


class Step(NamedTuple):
    """One step: its number from 1, the norm before clipping, the threshold, and whether it was skipped.

    The loss is NaN if none was recorded.
    """

    step: int
    norm: float
    max_norm: float
    skipped: bool = False
    layers: Layers | None = None
    loss: float = math.nan

    @property
    def finite(self) -> bool:
        """Whether the norm is finite."""
        return math.isfinite(self.norm)

    @property
    def clipped(self) -> bool:
        """Whether clipping fired: the norm is finite and above the threshold, and the step was not skipped."""
        return self.finite and self.norm > self.max_norm and not self.skipped

    @property
    def coefficient(self) -> float:
        """What the gradients were multiplied by: min(1, max_norm / norm), 0 if skipped, NaN if not finite."""
        if self.skipped:
            return 0.0
        if not self.finite:
            return math.nan
        return max(self.max_norm, 0.0) / self.norm if self.norm > self.max_norm else 1.0

    @property
    def tiny(self) -> bool:
        """Whether clipping multiplied the gradients by less than `TINY`, though the threshold is above 0."""
        return self.clipped and 0 < self.max_norm < TINY * self.norm

    def numbers(self, top: int = 0) -> dict[str, float]:
        """Return plain floats for a logger: flags as 0.0 and 1.0, and the `top` largest layers."""
        found = {
            "norm": self.norm,
            "max_norm": self.max_norm,
            "coefficient": self.coefficient,
            "clipped": float(self.clipped),
            "skipped": float(self.skipped),
            "nonfinite": float(not self.finite),
        }
        largest = self.layers.top(top) if self.layers else {}
        return found | {f"layers/{name}": norm for name, norm in largest.items()}


class Counts(NamedTuple):
    """How many steps there were, and how many were clipped, skipped or non-finite."""

    steps: int = 0
    clipped: int = 0
    skipped: int = 0
    nonfinite: int = 0

    def plus(self, steps: Iterable[Step]) -> "Counts":
        """Return the counts with these steps added."""
        counts = list(self)
        for step in steps:
            for place, one in enumerate((True, step.clipped, step.skipped, not step.finite)):
                counts[place] += one
        return Counts(*counts)

    @property
    def share_clipped(self) -> float:
        """The share of steps clipped; NaN without steps."""
        return self.clipped / self.steps if self.steps else math.nan


class Columns(NamedTuple):
    """Steps as arrays, one entry per step. A loss is NaN if none was recorded."""

    steps: np.ndarray
    norms: np.ndarray
    max_norms: np.ndarray
    clipped: np.ndarray
    skipped: np.ndarray
    losses: np.ndarray

    @property
    def finite(self) -> np.ndarray:
        """Whether each norm is finite."""
        return np.isfinite(self.norms)

    def of_finite_positive(self) -> "Columns":
        """Return the steps with a finite norm above 0."""
        some = self.finite & (self.norms > 0)
        return Columns(*(column[some] for column in self))

    @classmethod
    def of(cls, steps: Iterable[Step]) -> "Columns":
        """Turn steps into arrays."""
        rows = ((s.step, s.norm, s.max_norm, s.clipped, s.skipped, s.loss) for s in steps)
        table = np.fromiter(rows, np.dtype((np.float64, 6)))  # without a list of the rows: a log may have millions
        numbers, norms, max_norms, clipped, skipped, losses = table.T.copy()
        return cls(numbers.astype(np.int64), norms, max_norms, clipped > 0, skipped > 0, losses)


class LayerTable(NamedTuple):
    """Layer norms, shape (steps, layers); NaN if a layer was not recorded."""

    steps: np.ndarray
    names: tuple[str, ...]
    norms: np.ndarray

    @classmethod
    def of(cls, steps: Iterable[Step]) -> "LayerTable | None":
        """Collect the steps that recorded layers; None if no step did."""
        some = [(step.step, step.layers) for step in steps if step.layers is not None]
        if not some:
            return None
        places: dict[str, int] = {}
        for names in dict.fromkeys(layers.names for _, layers in some):
            for name in names:
                places.setdefault(name, len(places))
        dtype = np.result_type(*{layers.norms.dtype for _, layers in some})
        table = np.full((len(some), len(places)), np.nan, dtype)
        columns = {names: [places[name] for name in names] for names in {layers.names for _, layers in some}}
        for row, (_, layers) in zip(table, some, strict=True):
            row[columns[layers.names]] = layers.norms
        return cls(np.array([step for step, _ in some]), tuple(places), table)

    def medians(self) -> np.ndarray:
        """Return the median of each layer's finite norms; 0 without any."""
        found = [column[np.isfinite(column)] for column in self.norms.T]
        return np.array([np.median(column) if column.size else 0.0 for column in found])

    def top(self, count: int) -> "LayerTable":
        """Return the layers with the largest medians, largest first."""
        return self._of(self._order()[:count])

    def _order(self) -> list[int]:
        """Return the places of the layers, that with the largest median first."""
        return np.argsort(-self.medians(), kind="stable").tolist()

    def _of(self, places: list[int]) -> "LayerTable":
        return LayerTable(self.steps, tuple(self.names[place] for place in places), self.norms[:, places])

    def shown(
        self, count: int, spikes: int = 4, factor: float = 10.0, sampled: np.ndarray | None = None
    ) -> "LayerTable":
        """Return the layers with the largest medians, and last those that had a spike: at most `spikes` of them.

        A spike is a norm above `factor` times the median of the layer. Those with the largest spikes are returned.
        Medians are of the steps `sampled`, by default of all.
        """
        usual = self if sampled is None else self._replace(steps=self.steps[sampled], norms=self.norms[sampled])
        medians, order = usual.medians(), usual._order()
        highest = np.nanmax(np.where(np.isfinite(self.norms), self.norms, 0.0), axis=0)
        rest = [place for place in order[count:] if highest[place] > factor * medians[place]]
        also = sorted(rest, key=lambda place: -highest[place])[:spikes]
        return self._of([*order[: count - len(also)], *also])

    def largest(self, count: int) -> dict[str, float]:
        """Return the medians of the layers with the largest ones, largest first."""
        found = self.top(count)
        return dict(zip(found.names, found.medians().tolist(), strict=True))


class Handling(NamedTuple):
    """What the clipping calls do with steps that are not finite, and above how many times the threshold they skip."""

    nonfinite: str = "propagate"
    skip_above: float = math.inf

    @property
    def skips_spikes(self) -> bool:
        """Whether spikes are skipped."""
        return self.skip_above < math.inf


class Overview(NamedTuple):
    """What a picture or a page shows: the kept steps, the counts of all steps, how many layers to list, and spikes.

    `handling` is that of the last call, None if no call was recorded.
    """

    columns: Columns
    layers: LayerTable | None
    last: Step | None
    counts: Counts
    top: int
    spikes: tuple[Spike, ...] = ()
    records: Sequence[Step] = ()
    handling: Handling | None = None

    @classmethod
    def of(
        cls,
        steps: Sequence[Step],
        counts: Counts,
        top: int,
        spikes: Sequence[Spike] = (),
        handling: Handling | None = None,
    ) -> "Overview":
        """Collect it from the kept steps."""
        last = steps[-1] if steps else None
        return cls(Columns.of(steps), LayerTable.of(steps), last, counts, top, tuple(spikes), steps, handling)

    @property
    def layers_of_spikes(self) -> dict[int, Layers]:
        """The layer norms of the spikes that were measured, by step: they may be kept with the spike alone."""
        return {
            spike.step: Layers(tuple(one.name for one in spike.layers), np.array([one.norm for one in spike.layers]))
            for spike in self.spikes
            if spike.layers and not spike.raised
        }

    @property
    def top_layers(self) -> dict[str, float]:
        """The layers with the largest median norms, largest first; empty if none were recorded."""
        return self.layers.largest(self.top) if self.layers else {}


def nan_or(number: float) -> float:
    """Return a number, or for every NaN the same one, so that steps without a loss are equal."""
    return math.nan if math.isnan(number) else number


def narrowed(norms: np.ndarray) -> np.ndarray:
    """Return norms in float32, or unchanged if one of them is out of its range."""
    with np.errstate(over="ignore"):
        narrow = norms.astype(np.float32)
    return narrow if np.array_equal(np.isfinite(narrow), np.isfinite(norms)) else norms


def percentiles(norms: np.ndarray, which: Sequence[float] = (1, 10, 50, 90, 99)) -> Mapping[float, float]:
    """Return percentiles of the finite norms; empty if there are none."""
    finite = norms[np.isfinite(norms)]
    return dict(zip(which, np.percentile(finite, which).tolist(), strict=True)) if finite.size else {}
