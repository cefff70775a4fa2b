"""Rules of thresholds that follow, and norms that come one after the other."""

import math

import numpy as np

from gradclip import QuantileThreshold

RULES = [
    QuantileThreshold(),
    QuantileThreshold(factor=1.0, quantile=0.1, window=50),
    QuantileThreshold(factor=1.1, quantile=0.95, window=100),
    QuantileThreshold(factor=3.0, quantile=0.0, window=7),
    QuantileThreshold(factor=0.5, quantile=1.0, window=12),
    QuantileThreshold(window=1),
    QuantileThreshold(quantile=0.3, window=2, lower=0.125, upper=50.0),
    QuantileThreshold(quantile=0.07, window=100),
    QuantileThreshold(quantile=0.5, window=9, initial=1.0),
    QuantileThreshold(quantile=0.34, window=33),
]


def awkward_norms():
    """Return norms of any size, with junk and the ends of the range of float32 between them."""
    rng = np.random.default_rng(3)
    norms = np.exp(rng.uniform(-85, 85, 300)).astype(np.float32)
    edges = np.float32([2.0**-126, 2.0**-125, 2.0**126, 2.0**127, 3.4e38, 2.0**-149, 1e-38])
    return np.where(rng.random(300) < 0.3, rng.choice([*edges, math.nan, math.inf, 0.0, -1.0], 300), norms)
