"""What the sweep found: accuracies for each kind of clipping and learning rate, as numbers, sentences and a table."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from rich import box
from rich.table import Table

Clipping = Literal["none", "fixed", "adaptive"]
KINDS: tuple[Clipping, ...] = ("none", "fixed", "adaptive")
WORKS = 0.8


@dataclass(frozen=True)
class Trained:
    """All seeds of one kind of clipping at one learning rate. Each tuple has one number for each seed.

    A loss that is not finite in the last step counts as diverged.
    """

    clipping: Clipping
    rate: float
    test_accuracy: tuple[float, ...]
    clipped_share: tuple[float, ...]
    diverged: tuple[bool, ...]

    @property
    def median(self) -> float:
        """The median test accuracy over the seeds."""
        return float(np.median(self.test_accuracy))

    @property
    def spread(self) -> tuple[float, float]:
        """The least and the most test accuracy."""
        return min(self.test_accuracy), max(self.test_accuracy)


class Sweep:
    """The trainings of all kinds of clipping at all learning rates."""

    def __init__(self, trained: list[Trained], max_norm: float) -> None:
        self.trained = trained
        self.rates = sorted({one.rate for one in trained})
        self.max_norm = max_norm
        self.names = {"none": "no clipping", "fixed": f"fixed, {max_norm:g}", "adaptive": "adaptive"}
        self._found = {(one.clipping, one.rate): one for one in trained}

    def of(self, clipping: Clipping) -> list[Trained]:
        """Return the trainings of one kind of clipping, by learning rate."""
        return [self.at(clipping, rate) for rate in self.rates]

    def at(self, clipping: Clipping, rate: float) -> Trained:
        """Return one training."""
        return self._found[clipping, rate]

    def working(self, clipping: Clipping) -> list[float]:
        """Return the learning rates at which the median accuracy is at least `WORKS`."""
        return [one.rate for one in self.of(clipping) if one.median >= WORKS]

    @property
    def shown(self) -> float:
        """The learning rate at which the adaptive threshold gains most over no clipping."""
        return max(self.rates, key=lambda rate: self.at("adaptive", rate).median - self.at("none", rate).median)

    def summary(self) -> str:
        """Say in two sentences what the picture shows, on any processor: where training fails, accuracies differ."""
        none, adaptive = self.at("none", self.shown), self.at("adaptive", self.shown)
        seeds = len(none.test_accuracy)
        without = f"{none.median:.0%}" if none.median >= WORKS else f"below {WORKS:.0%}"
        rates = {kind: _listed(self.working(kind)) for kind in KINDS}
        return (
            f"Median test accuracy of {seeds} seed{'s' * (seeds > 1)} is at least {WORKS:.0%} at {rates['none']} "
            f"without clipping, at {rates['fixed']} with a fixed threshold of {self.max_norm:g}, and at "
            f"{rates['adaptive']} with an adaptive threshold at its defaults. Below are the norms of an adaptive run "
            f"at rate {self.shown:g}: {adaptive.clipped_share[0]:.0%} of its steps are clipped, and at this rate the "
            f"median accuracy is {adaptive.median:.0%}, without clipping {without}."
        )

    def table(self) -> Table:
        """Return a table: a row for each learning rate, a column for each kind of clipping."""
        table = Table(
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            caption="Test accuracy: median over the seeds (least to most).",
            caption_justify="left",
        )
        table.add_column("rate", justify="right", no_wrap=True)
        for name in self.names.values():
            table.add_column(name, no_wrap=True)
        for rate in self.rates:
            table.add_row(f"{rate:g}", *(_cell(self.at(kind, rate)) for kind in KINDS))
        return table


def _cell(one: Trained) -> str:
    least, most = one.spread
    return f"{one.median:.1%} ({100 * least:.1f} to {100 * most:.1f})"


def _listed(rates: list[float]) -> str:
    if not rates:
        return "no learning rate"
    *first, last = (f"{rate:g}" for rate in rates)
    return f"learning rates {', '.join(first)} and {last}" if first else f"learning rate {last}"
