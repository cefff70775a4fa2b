"""What is told of a step that was skipped, or whose gradients were far larger than before, or not finite."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gradclip._src.words import listed

_SAID = 3  # layers in a sentence
_LONGEST = 120  # characters of a context


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
