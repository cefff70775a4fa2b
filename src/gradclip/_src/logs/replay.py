"""What rules would have done to the norms of a log."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gradclip._src.logs.rules import ThresholdRule
from gradclip._src.monitor.records import Columns
from gradclip._src.monitor.trend import SPIKE, medians_before


class Replayed(NamedTuple):
    """What a rule would have done: its threshold at each step, and which steps it would have clipped and skipped."""

    rule: str
    max_norms: np.ndarray
    clipped: np.ndarray
    skipped: np.ndarray
    spikes: np.ndarray
    norms: np.ndarray

    @property
    def after(self) -> np.ndarray:
        """The norms after clipping; 0 at skipped steps, NaN where the norm is not finite."""
        clipped = np.where(np.isfinite(self.norms), np.minimum(self.norms, self.max_norms), math.nan)
        return np.where(self.skipped, 0.0, clipped)

    @property
    def stopped(self) -> int:
        """The number of spikes that are clipped or skipped."""
        return int((self.spikes & (self.clipped | self.skipped)).sum())

    def plain(self) -> dict[str, Any]:
        """Return it as numbers."""
        after = self.after[np.isfinite(self.after)]
        return {
            "rule": self.rule,
            "share_clipped": float(self.clipped.mean()),
            "share_skipped": float(self.skipped.mean()),
            "spikes": int(self.spikes.sum()),
            "spikes_stopped": self.stopped,
            "median_threshold": float(np.median(self.max_norms)),
            "last_threshold": float(self.max_norms[-1]),
            "largest_after": float(after.max()) if after.size else math.nan,
        }


def replay(columns: Columns, rules: Sequence[ThresholdRule]) -> list[Replayed]:
    """Apply each rule to the norms, one after the other, as if the norms did not depend on the rule."""
    norms = columns.norms
    positive = columns.of_finite_positive()
    above = positive.norms > SPIKE * medians_before(positive.norms.clip(max=1e300))
    spikes = np.isin(columns.steps, positive.steps[above])
    return [_replayed(rule, norms, spikes) for rule in rules]


def _replayed(rule: ThresholdRule, norms: np.ndarray, spikes: np.ndarray) -> Replayed:
    max_norms = np.full(len(norms), rule.fixed) if rule.follows is None else _followed(rule, norms)
    finite = np.isfinite(norms)
    skipped = (
        finite & (norms > max_norms * rule.skip_above) if rule.skip_above < math.inf else np.zeros(len(norms), bool)
    )
    return Replayed(rule.name, max_norms, finite & (norms > max_norms) & ~skipped, skipped, spikes, norms)


def _followed(rule: ThresholdRule, norms: np.ndarray) -> np.ndarray:
    follows = rule.follows
    assert follows is not None
    history = follows.init(np.zeros((), np.float64))
    found = []
    for norm in norms:
        found.append(float(follows.max_norm(history)))
        history = follows.observe(history, norm)
    return np.array(found)
