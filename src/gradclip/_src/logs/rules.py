"""Rules that set a threshold, from how a user writes them: `1.0`, `adaptive`, `quantile:factor=3,window=64`."""

import math
from dataclasses import fields
from typing import Any, NamedTuple

from gradclip._src.thresholds.holder import AdaptiveNorm
from gradclip._src.thresholds.quantile import QuantileThreshold
from gradclip._src.thresholds.spread import SpreadThreshold
from gradclip._src.thresholds.steady import SteadyThreshold
from gradclip._src.words import shown

_SKIP = "skip_above"
_SKIPPED_BY_DEFAULT = 4.0
_AUTOCLIP = {"factor": 1.0, "quantile": 0.9, "window": 1000.0}
RULES: dict[str, type[QuantileThreshold]] = {
    "adaptive": SpreadThreshold,
    "spread": SpreadThreshold,
    "steady": SteadyThreshold,
    "quantile": QuantileThreshold,
    "skip": QuantileThreshold,
    "autoclip": QuantileThreshold,
}


class ThresholdRule(NamedTuple):
    """A rule: as the user wrote it, a fixed threshold or the rule that follows the norms, and what it skips above."""

    name: str
    fixed: float | None
    follows: QuantileThreshold | None
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
        if made.below_usual and not math.isinf(skip):
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
        kept = AdaptiveNorm(made(**settings), skip_above=skip)  # checks them together
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
