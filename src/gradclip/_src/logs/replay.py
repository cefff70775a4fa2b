"""Rules that set a threshold, as a user writes them, and what they would have done to the norms of a log."""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from gradclip._src.monitor.records import Columns
from gradclip._src.monitor.trend import SPIKE, medians_before
from gradclip._src.thresholds.below_usual import SpreadRule, SteadyRule
from gradclip._src.thresholds.following import FollowingRule
from gradclip._src.thresholds.holder import AdaptiveThreshold
from gradclip._src.thresholds.quantile import QuantileRule
from gradclip._src.words import shown

_SKIP = "skip_above"
_SKIPPED_BY_DEFAULT = 4.0
_AUTOCLIP = {"factor": 1.0, "quantile": 0.9, "window": 1000.0}
RULES: dict[str, type[QuantileRule | SpreadRule | SteadyRule]] = {
    "adaptive": SpreadRule,
    "spread": SpreadRule,
    "steady": SteadyRule,
    "quantile": QuantileRule,
    "skip": QuantileRule,
    "autoclip": QuantileRule,
}


class ThresholdRule(NamedTuple):
    """A rule: as the user wrote it, a fixed threshold or the rule that follows the norms, and what it skips above."""

    name: str
    fixed: float | None
    follows: FollowingRule | None
    skip_above: float = math.inf

    @classmethod
    def parse(cls, text: str) -> "ThresholdRule":
        """Return the rule that a text names. Raises ValueError for others."""
        text = text.strip()
        try:
            fixed = float(text)
        except ValueError:
            return cls._following(text)
        if not fixed >= 0:
            raise ValueError(f"a fixed threshold must not be negative or NaN, got {text}.")
        return cls(text, fixed, None)

    @classmethod
    def _following(cls, text: str) -> "ThresholdRule":
        kind, _, rest = text.partition(":")
        given = _settings(text, rest)
        skip = given.pop(_SKIP, math.inf)
        made = RULES.get(kind)
        if made is None:
            names = ", ".join(RULES)
            raise ValueError(f"there is no rule {shown(text)}. A rule is a number, {names}. Try quantile:factor=3")
        if made._below_usual and not math.isinf(skip):
            raise ValueError(f"the rule {kind!r} cannot skip steps. Use quantile:{_SKIP}=4 or skip, not {shown(text)}.")
        if kind == "autoclip":
            given = _AUTOCLIP | given
        elif kind == "skip":
            skip = _SKIPPED_BY_DEFAULT if math.isinf(skip) else skip
        known = [field.name for field in fields(made) if field.init]
        if unknown := sorted(given.keys() - set(known)):
            raise ValueError(f"the rule {shown(text)} has no setting {shown(unknown[0])}. It has {', '.join(known)}.")
        settings: dict[str, Any] = dict(given)
        if given.get("window", math.inf).is_integer():
            settings["window"] = int(given["window"])
        kept = AdaptiveThreshold(made(**settings), skip_above=skip)  # checks them together
        return cls(text, None, kept.rule, kept.skip_above)


def _settings(text: str, rest: str) -> dict[str, float]:
    found = {}
    for one in filter(None, rest.split(",")):
        name, equals, value = one.partition("=")
        try:
            if not equals:
                raise ValueError
            found[name.strip()] = float(value)
        except ValueError:
            raise ValueError(f"the rule {shown(text)} must be written like quantile:factor=3,window=64.") from None
    return found


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
            "clipped_share": float(self.clipped.mean()),
            "skipped_share": float(self.skipped.mean()),
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
