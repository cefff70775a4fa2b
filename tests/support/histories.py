"""Norms and losses to give advice on."""

import math

import numpy as np

from gradclip._src.monitor.records import Columns, Step

STEADY = np.tile([0.9, 1.0, 1.1, 1.0], 75)
FALLING = np.linspace(2.0, 1.0, 300)


def columns(norms, max_norm=math.inf, losses=None, skipped=()):
    max_norms = np.broadcast_to(max_norm, len(norms)).tolist()
    losses = np.full(len(norms), np.nan) if losses is None else losses
    rows = zip(np.asarray(norms, float).tolist(), max_norms, np.asarray(losses, float).tolist(), strict=True)
    return Columns.of([Step(i, n, m, i in skipped, loss=value) for i, (n, m, value) in enumerate(rows, 1)])


def said(advice, words):
    return any(words in reason for reason in advice.reasons)


def summary(advice):
    return advice.state, advice.try_values
