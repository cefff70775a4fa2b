"""Records of one step and of many, in plain numbers, and what is told of a step that was skipped or far larger."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradclip._src.public import public, record
from gradclip._src.words import listed

_SAID = 3  # layers in a sentence
_LONGEST = 120  # characters of a context


@record
class LayerOfSpike(NamedTuple):
    """One layer at a spike.

    Attributes:
        name: its name.
        norm: its norm before clipping.
        share: its share of the sum of the layers' squared norms; NaN if one of them is not finite.
        times: its norm, divided by its usual one, the median of its norms before; NaN without such a median above 0.
        since: the first of the steps in a row, up to the spike, at which its norm was more than twice the usual one, or
            not finite; steps that recorded no layers are passed over.

    """

    name: str
    norm: float
    share: float
    times: float
    since: int

    @property
    def finite(self) -> bool:
        """Whether the norm is finite."""
        return math.isfinite(self.norm)

    def __str__(self) -> str:
        if not self.finite:
            return f"{self.name} ({self.norm:g}, since step {self.since:,})"
        usual = "" if math.isnan(self.times) else f", {rounded(self.times)} times its usual norm"
        return f"{self.name} ({self.share:.0%} of its square, norm {self.norm:.4g}{usual}, since step {self.since:,})"


@public
class Spike(NamedTuple):
    """A step that was skipped, with a norm above 10 times the median of the 128 before, or with NaN or infinity.

    Attributes:
        step: the number of the step; of a call that raised, the number that it would have had.
        norm: the norm before clipping. With `nonfinite="zero"`, that of the finite elements. NaN if the call raised.
        level: the median of the 128 finite norms above 0 before; NaN if there are fewer than five.
        loss: the loss of the step, NaN if it was not recorded.
        context: what was passed as `context=`.
        layers: the layers, first those that are not finite, then by how much they added to the squared norm: the
            square of the norm, less that of the usual norm. Empty if no layer norms were recorded at this step.
        max_norm: the threshold of the step; NaN for a call that raised.
        skipped: whether the step was skipped.
        raised: whether the call raised FloatingPointError. It then is no step of the monitor.

    """

    step: int
    norm: float
    level: float
    loss: float = math.nan
    context: Any = None
    layers: Sequence[LayerOfSpike] = ()
    max_norm: float = math.nan
    skipped: bool = False
    raised: bool = False

    @property
    def finite(self) -> bool:
        """Whether the norm and those of all layers are finite."""
        return math.isfinite(self.norm) and all(layer.finite for layer in self.layers)

    @property
    def times(self) -> float:
        """The norm, divided by the level."""
        return self.norm / self.level

    @property
    def since(self) -> int:
        """Since when the first layer has been above its usual level; without layers, the step itself."""
        return self.layers[0].since if self.layers else self.step

    def __str__(self) -> str:
        parts = [f"Step {self.step:,}: {self._what()}.", *self._who()]
        if not math.isnan(self.loss):
            parts.append(f"The loss was {self.loss:.4g}.")
        if self.context is not None:
            told = " ".join(described(self.context).split())
            parts.append(f"Context: {told if len(told) <= _LONGEST else told[: _LONGEST - 3] + '...'}.")
        return " ".join(parts)

    def _what(self) -> str:
        if self.raised:
            return "clipping raised, because the gradients hold NaN or infinity"
        after = ", and the step was skipped" if self.skipped else ""
        if not math.isfinite(self.norm):
            return f"the norm was {self.norm:g}{after}"
        if not self.finite:
            return f"the gradients held NaN or infinity, and the norm of the rest was {self.norm:.4g}{after}"
        above = f", {rounded(self.times)} times the level before ({self.level:.4g})" if self.level > 0 else ""
        return f"the norm was {self.norm:.4g}{above}{after}"

    def _who(self) -> list[str]:
        """Name the layers: those that are not finite, or those that make most of the squared norm."""
        broken = [layer for layer in self.layers if not layer.finite]
        if broken:
            said = [f"{layer}" for layer in broken[:_SAID]]
            rest = len(broken) - len(said)
            more = f" and {rest:,} more" if rest else ""
            return [f"Not finite: {', '.join(said)}{more}, {len(broken):,} of {len(self.layers):,} layers."]
        if not self.layers or not math.isfinite(self.norm):
            return []
        first, *others = self.layers[:_SAID]
        also = [str(layer) for layer in others if layer.share >= 0.1]
        return [f"It came mostly from {listed([str(first), *also])}."]


def described(context: object) -> str:
    """Return what `repr` says of a context; what Python says of any object if that fails, as for deleted arrays."""
    try:
        return repr(context)
    except Exception:
        return object.__repr__(context)


def rounded(number: float) -> str:
    """Return a factor with three digits, or as a whole number."""
    return f"{number:,.0f}" if 100 <= number < 1e6 else f"{number:.3g}"


TINY = 1e-6
"""With coefficients below it, an optimizer may lose the gradients."""


@record
class Layers(NamedTuple):
    """The layer norms before clipping, in float32 if it can hold them, and the unique names of the layers."""

    names: tuple[str, ...]
    norms: np.ndarray

    def top(self, count: int) -> dict[str, float]:
        """Return the largest norms, largest first; NaN counts as the largest."""
        order = np.argsort(-np.where(np.isnan(self.norms), np.inf, self.norms), kind="stable")[:count]
        return {self.names[index]: float(self.norms[index]) for index in order.tolist()}


@record
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


@record
class Counts(NamedTuple):
    """How many steps there were, and how many were clipped, skipped or non-finite."""

    steps: int = 0
    num_clipped: int = 0
    num_skipped: int = 0
    num_nonfinite: int = 0

    def plus(self, steps: Iterable[Step]) -> "Counts":
        """Return the counts with these steps added."""
        counts = list(self)
        for step in steps:
            for place, one in enumerate((True, step.clipped, step.skipped, not step.finite)):
                counts[place] += one
        return Counts(*counts)

    @property
    def clipped_share(self) -> float:
        """The share of steps clipped; NaN without steps."""
        return self.num_clipped / self.steps if self.steps else math.nan


@record
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


@record
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
