"""Rules of thresholds that follow, and norms that come one after the other."""

import math

import numpy as np

from gradclip import QuantileRule, SpreadRule, SteadyRule

RULES = [
    QuantileRule(),
    QuantileRule(factor=1.0, quantile=0.1, window=50),
    QuantileRule(factor=1.1, quantile=0.95, window=100),
    QuantileRule(factor=3.0, quantile=0.0, window=7),
    QuantileRule(factor=0.5, quantile=1.0, window=12),
    QuantileRule(window=1),
    QuantileRule(quantile=0.3, window=2, lower=0.125, upper=50.0),
    QuantileRule(quantile=0.07, window=100),
    QuantileRule(quantile=0.5, window=9, initial=1.0),
    QuantileRule(quantile=0.34, window=33),
]
SPREAD_RULES = [
    SpreadRule(),
    SpreadRule(factor=0.3, quantile=0.0, window=7),
    SpreadRule(factor=3.0, quantile=0.5, window=12, upper=50.0),
    SpreadRule(quantile=0.25, window=1, initial=1.0),
]
STEADY_RULES = [
    SteadyRule(),
    SteadyRule(factor=0.3, quantile=0.0, window=7),
    SteadyRule(factor=3.0, quantile=0.9, window=12, lower=0.125, upper=50.0),
    SteadyRule(window=1, initial=1.0),
]


def awkward_norms():
    """Return norms of any size, with junk and the ends of the range of float32 between them."""
    rng = np.random.default_rng(3)
    norms = np.exp(rng.uniform(-85, 85, 300)).astype(np.float32)
    edges = np.float32([2.0**-126, 2.0**-125, 2.0**126, 2.0**127, 3.4e38, 2.0**-149, 1e-38])
    return np.where(rng.random(300) < 0.3, rng.choice([*edges, math.nan, math.inf, 0.0, -1.0], 300), norms)


JUNK = np.array([math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 1e-45, 1e-320, 1e300])
"""What is not finite or not positive to a history of float32."""

HISTORIES = 2_000  # of each rule


def fed(rule, history, norms):
    for norm in norms:
        history = rule.observe(history, norm)
    return history


def clamped(rule, norm):
    """Return the threshold of a level, as float32 rounds it."""
    return np.clip(np.float32(norm) * np.float32(rule.factor), np.float32(rule.lower), np.float32(rule.upper))


def hostile(rng, rule):
    """Return a history for each column after up to three windows of norms of any size, and junk."""
    history = rule.init(shape=(HISTORIES,))
    lengths = rng.integers(0, 3 * rule.window + 1, HISTORIES)
    levels = np.exp(rng.uniform(-60, 60, HISTORIES))
    for step in range(3 * rule.window):
        norms = levels * np.exp(rng.choice([0.0, 1.0, 20.0], HISTORIES) * rng.standard_normal(HISTORIES))
        norms = np.where(rng.random(HISTORIES) < 0.3, rng.choice(JUNK, HISTORIES), norms)
        history = rule.observe(history, np.where(step < lengths, norms, math.nan))
    return history


def on_a_level(rule):
    """Return hostile histories after K norms of a level, with junk between them, and the ends of each level."""
    rng = np.random.default_rng(rule.window)
    history = hostile(rng, rule)
    low = np.exp(rng.uniform(-30, 30, HISTORIES)).astype(np.float32)
    high = low * (1 + rng.exponential(size=HISTORIES)).astype(np.float32)
    left = np.full(HISTORIES, rule.recovery_steps)
    while left.any():
        norms = rng.uniform(low, high).clip(low, high)
        good = (left > 0) & (rng.random(HISTORIES) < 0.6)
        history = rule.observe(history, np.where(good, norms, rng.choice(JUNK, HISTORIES)))
        left -= good
    return low, high, history
