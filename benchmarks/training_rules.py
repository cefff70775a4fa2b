"""The rules that the trainings compare: none, fixed thresholds over four decades, gradclip's, and those of others."""

import importlib.util
import math
from functools import partial

from published_rules import AutoClip, Fixed, Ours, OursBySpread, ZClip, clipped
from training_runs import PerUnit

import gradclip


class NoClipping:
    """Leaves every norm as it is."""

    limit = math.inf

    def after(self, norm):
        return norm


class InstalledSmartClip:
    """The rule of the smartclip package with its defaults, as its own code computes it."""

    def __init__(self):
        import smartclip

        self.rule = smartclip.AutoClip()

    def after(self, norm):
        self.rule.observe(norm)
        return clipped(norm, self.rule.threshold()) if self.rule.can_clip() else norm


def quantile(factor, share):
    return Ours(gradclip.QuantileRule(factor=factor, quantile=share))


FIXED = tuple(float(f"{10 ** (half / 2):.1g}") for half in range(-4, 5))
RULES = {
    "none": NoClipping,
    **{f"fixed {threshold:g}": partial(Fixed, threshold) for threshold in FIXED},
    "AdaptiveThreshold": OursBySpread,
    "SteadyRule": lambda: Ours(gradclip.SteadyRule()),
    "twice the median": partial(quantile, 2.0, 0.5),
    "quantile 0.1": partial(quantile, 1.0, 0.1),
    "quantile 0.5": partial(quantile, 1.0, 0.5),
    "quantile 0.9": partial(quantile, 1.0, 0.9),
    "AGC 0.01": partial(PerUnit, 0.01),
    "ZClip": ZClip,
    "AutoClip": AutoClip,
    "smartclip": InstalledSmartClip,
}
INSTALLED = [name for name in RULES if name != "smartclip" or importlib.util.find_spec("smartclip")]
SHORT = ["none", "fixed 0.1", "fixed 1", "AdaptiveThreshold", "twice the median"]
