"""The losses of one threshold, and which thresholds are about as good as the best."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from gradclip._src.public import record

_AS_GOOD = 0.01  # of the distance from the best loss to the one that a quarter exceeds
_FARTHEST = 10.0  # times the best loss: losses that have exploded are no measure


@record
class Trial(NamedTuple):
    """The final losses of one threshold and learning rate, one for each seed; NaN where training diverged."""

    max_norm: float
    learning_rate: float | None
    losses: tuple[float, ...]

    @property
    def diverged(self) -> int:
        """How many seeds diverged."""
        return sum(math.isnan(loss) for loss in self.losses)

    @property
    def loss(self) -> float:
        """The mean over the seeds; infinity if one diverged."""
        return math.inf if self.diverged else float(np.mean(np.clip(self.losses, -1e300, 1e300)))

    @property
    def error(self) -> float:
        """The standard error of the mean; 0 with one seed."""
        count = len(self.losses)
        return float(np.std(np.clip(self.losses, -1e150, 1e150), ddof=1)) / math.sqrt(count) if count > 1 else 0.0


def plateau_of(table: Sequence[Trial]) -> tuple[Trial, ...]:
    """Return the best trial and its neighbours in threshold, at its learning rate, that are about as good.

    A loss is about as good if it exceeds the best by at most two standard errors of the best, or by at most 1% of the
    best, or by at most 1% of the distance from the best to the 75th percentile of all finite losses. The last counts up
    to 10% of the best: finite losses may have exploded. Empty if every trial diverged.
    """
    best = min(table, key=lambda trial: trial.loss)
    if not math.isfinite(best.loss):
        return ()
    poor = float(np.percentile([trial.loss for trial in table if math.isfinite(trial.loss)], 75))
    scale = min(max(poor - best.loss, abs(best.loss)), _FARTHEST * abs(best.loss))
    most = best.loss + max(2 * best.error, _AS_GOOD * scale)
    row = [trial for trial in table if trial.learning_rate == best.learning_rate]
    groups = [tuple(group) for _, group in groupby(row, key=lambda trial: trial.loss <= most)]
    return next(group for group in groups if best in group)


def middle_of(plateau: Sequence[Trial]) -> Trial | None:
    """Return the middle of a plateau; of two in the middle, the one with the lower loss. None if it is empty."""
    half = len(plateau) // 2
    middle = plateau[half : half + 1] if len(plateau) % 2 else plateau[half - 1 : half + 1]
    return min(middle, key=lambda trial: trial.loss, default=None)
