"""Records of one step and of many, in plain numbers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Layers(NamedTuple):
    """The layer norms before clipping, in float32 if it can hold them, and the unique names of the layers."""

    names: tuple[str, ...]
    norms: np.ndarray

    def top(self, count: int) -> dict[str, float]:
        """Return the largest norms, largest first; NaN counts as the largest."""
        order = np.argsort(-np.where(np.isnan(self.norms), np.inf, self.norms), kind="stable")[:count]
        return {self.names[index]: float(self.norms[index]) for index in order.tolist()}


class Step(NamedTuple):
    """One step: its number from 1, the norm before clipping, the threshold, and whether it was skipped."""

    step: int
    norm: float
    max_norm: float
    skipped: bool = False
    layers: Layers | None = None

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
    """Steps as arrays, one entry per step."""

    steps: np.ndarray
    norms: np.ndarray
    max_norms: np.ndarray
    clipped: np.ndarray
    skipped: np.ndarray

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
        rows = [(s.step, s.norm, s.max_norm, s.clipped, s.skipped) for s in steps]
        table = np.array(rows, np.float64).reshape(-1, 5)
        return cls(table[:, 0].astype(np.int64), table[:, 1], table[:, 2], table[:, 3] > 0, table[:, 4] > 0)


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
        order = np.argsort(-self.medians(), kind="stable")[:count]
        return LayerTable(self.steps, tuple(self.names[index] for index in order.tolist()), self.norms[:, order])

    def largest(self, count: int) -> dict[str, float]:
        """Return the medians of the layers with the largest ones, largest first."""
        found = self.top(count)
        return dict(zip(found.names, found.medians().tolist(), strict=True))


class Overview(NamedTuple):
    """What a picture or a page shows: the kept steps, the counts of all steps, and how many layers to list."""

    columns: Columns
    layers: LayerTable | None
    last: Step | None
    counts: Counts
    top: int

    @classmethod
    def of(cls, steps: Sequence[Step], counts: Counts, top: int) -> "Overview":
        """Collect it from the kept steps."""
        return cls(Columns.of(steps), LayerTable.of(steps), steps[-1] if steps else None, counts, top)

    @property
    def top_layers(self) -> dict[str, float]:
        """The layers with the largest median norms, largest first; empty if none were recorded."""
        return self.layers.largest(self.top) if self.layers else {}


def narrowed(norms: np.ndarray) -> np.ndarray:
    """Return norms in float32, or unchanged if one of them is out of its range."""
    with np.errstate(over="ignore"):
        narrow = norms.astype(np.float32)
    return narrow if np.array_equal(np.isfinite(narrow), np.isfinite(norms)) else norms


def percentiles(norms: np.ndarray, which: Sequence[float] = (1, 10, 50, 90, 99)) -> Mapping[float, float]:
    """Return percentiles of the finite norms; empty if there are none."""
    finite = norms[np.isfinite(norms)]
    return dict(zip(which, np.percentile(finite, which).tolist(), strict=True)) if finite.size else {}


def printable(text: str) -> str:
    """Return text for pictures and pages. Control characters, lone surrogates and the like are escaped."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
