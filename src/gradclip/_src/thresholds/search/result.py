"""The result of a search: which threshold is best, and the losses of all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gradclip._src.thresholds.search.trials import Trial, middle_of, plateau_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class MaxNormSearch:
    """What `gradclip.find_max_norm` found. Print it for the table.

    Attributes:
        table: one `Trial` for each learning rate and threshold, in this order, both ascending: `max_norm`,
            `learning_rate`, `losses` (one for each seed), `loss` (their mean, infinity if one is NaN), `diverged`.
        seeds: the seeds.

    """

    table: tuple[Trial, ...]
    seeds: tuple[int, ...]

    @property
    def plateau(self) -> tuple[Trial, ...]:
        """The best trial and its neighbours in threshold that are about as good; empty if every trial diverged.

        They exceed the lowest loss by at most two standard errors, or 1% of it, or 1% of the distance to the 75th
        percentile of all losses, if that is at most 10% of it.
        """
        return plateau_of(self.table)

    @property
    def best(self) -> Trial | None:
        """The middle of the plateau; of two in the middle, the one with the lower loss. None if all diverged."""
        return middle_of(self.plateau)

    @property
    def max_norm(self) -> float | None:
        """The best threshold: the middle of the plateau. None if every trial diverged."""
        return self.best and self.best.max_norm

    @property
    def learning_rate(self) -> float | None:
        """The learning rate that the best threshold belongs to; None if no rates were tried, or all diverged."""
        return self.best and self.best.learning_rate

    def __str__(self) -> str:
        best, plateau = self.best, self.plateau
        rates = self.table[0].learning_rate is not None
        seeds = "1 seed" if len(self.seeds) == 1 else f"{len(self.seeds)} seeds"
        lines = [_proposal(best), f"{'learning rate':>14}" * rates + f"{'max_norm':>10}{'mean loss':>12}  of {seeds}"]
        for trial in self.table:
            rate = f"{trial.learning_rate:>14.4g}" if trial.learning_rate is not None else ""
            loss = f"{trial.loss:>12.4g}" if not trial.diverged else f"{'diverged':>12}"
            mark = "  best" if trial is best else "  about as good" if trial in plateau else ""
            if trial.diverged and len(self.seeds) > 1:
                mark = f"  {trial.diverged} of {len(self.seeds)} seeds"
            lines.append(f"{rate}{trial.max_norm:>10.4g}{loss}{mark}")
        return "\n".join([*lines, *self._notes()])

    def _notes(self) -> list[str]:
        """Say where the search was too narrow to trust its end."""
        plateau, row = self.plateau, [t.max_norm for t in self.table if t.learning_rate == self.learning_rate]
        if not plateau or len(row) == 1:
            return []
        low, high = plateau[0].max_norm == row[0], plateau[-1].max_norm == row[-1]
        if low and high:
            return ["At this learning rate, all thresholds are about as good."]
        if low and row[0] > 0:
            return ["The lowest threshold is among the best: try lower ones too."]
        return ["The highest threshold is among the best: try higher ones too."] if high and row[-1] < math.inf else []

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the mean loss over thresholds, one line for each learning rate. With a path, also save it there.

        Each dot is one seed. Raises ModuleNotFoundError if matplotlib is not installed.
        """
        from gradclip._src.thresholds.search.picture import draw

        figure = draw(self.table, self.best)
        if path is not None:
            figure.savefig(path)
        return figure


def _proposal(best: Trial | None) -> str:
    if best is None:
        return "Every training diverged. Try lower thresholds or learning rates."
    rate = "" if best.learning_rate is None else f", learning_rate = {best.learning_rate:g}"
    return f"max_norm = {best.max_norm:g}{rate}"
