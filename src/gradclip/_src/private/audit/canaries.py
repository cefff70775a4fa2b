"""A lower bound on the epsilon of a training run, from one run with many canaries.

A canary is an example that is put into the data or left out by a fair coin, and whose effect is easy to see in what the
run releases. If an observer of the run guesses many of the coins, the run spent much privacy.

Let a run be (epsilon, delta) private for adding or removing one example. Let m canaries be in it by independent fair
coins, and let an observer guess r of the coins. Steinke, Nasr and Jagielski (2023, "Privacy Auditing with One (1)
Training Run", theorem 5.2) prove that v or more guesses are right with a probability of at most
P(B >= v) + 2 m delta * max over i in 1..m of P(v > B >= v - i) / i, where B is binomial with r trials of probability
e**epsilon / (1 + e**epsilon). If that is below 1 - confidence, epsilon is refuted.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from gradclip._src.private.sums.settings import as_count, as_number
from gradclip._src.public import public
from gradclip._src.words import with_advice

_LARGEST = 64.0


@public
@with_advice
def audited_epsilon(
    scores: ArrayLike, included: ArrayLike, *, guesses: int, delta: float, confidence: float = 0.95
) -> float:
    """Return the largest epsilon that one run with canaries refutes: what it claims must lie above.

    Args:
        scores: a number for each canary, shape (m,): the higher, the more it looks as if the canary was in the run.
        included: whether it was, m booleans from independent fair coins.
        guesses: how many coins to guess, an even number of at most m, chosen before you look: the half with the highest
            scores was in, the half with the lowest was out.
        delta: that of the claim.
        confidence: how sure the bound must be. A run that keeps its claim is refuted with a probability of at most
            1 - confidence.

    Returns:
        A float, 0.0 if nothing is refuted.

    Raises:
        ValueError: shapes that differ, scores that are NaN, `included` that are not booleans, a number out of range.

    >>> was_in = [i >= 50 for i in range(100)]
    >>> # 0.05**0.01 = 0.9705 = e**x / (1 + e**x)
    >>> round(audited_epsilon(range(100), was_in, guesses=100, delta=0.0), 3)
    3.493
    """
    values, coins = np.asarray(scores, dtype=float), np.asarray(included)
    if values.ndim != 1 or values.shape != coins.shape or np.isnan(values).any():
        raise ValueError(f"scores must be one number for each canary, got shapes {values.shape} and {coins.shape}.")
    if coins.dtype != bool:
        raise ValueError(f"included must hold a boolean for each canary, got dtype {coins.dtype}.")
    count, sure = as_count("guesses", guesses), as_number("confidence", confidence)
    if count % 2 or count > values.size:
        raise ValueError(f"guesses must be an even number of at most {values.size} canaries, got {guesses!r}.")
    if not 0 < sure < 1 or not 0 <= as_number("delta", delta) < 1:
        raise ValueError(f"confidence and delta must be probabilities, got {confidence!r} and {delta!r}.")
    # Ties are broken by chance: callers may list the canaries that were in first, or last.
    order = np.lexsort((np.random.default_rng(0).permutation(values.size), values))
    correct = int(coins[order[-(count // 2) :]].sum() + (~coins[order[: count // 2]]).sum())
    low, high = 0.0, _LARGEST
    if chance_of_guesses(values.size, count, correct, low, delta) > 1 - sure:
        return 0.0
    for _ in range(50):
        middle = (low + high) / 2
        refuted = chance_of_guesses(values.size, count, correct, middle, delta) <= 1 - sure
        low, high = (middle, high) if refuted else (low, middle)
    return low


def chance_of_guesses(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return a bound on the probability of so many right guesses, if a run is (epsilon, delta) private.

    >>> # Two fair coins:
    >>> chance_of_guesses(canaries=3, guesses=2, correct=2, epsilon=0.0, delta=0.0)
    0.25
    """
    exactly = _binomial(guesses, 1 / (1 + math.exp(-epsilon)))
    at_least = float(exactly[correct:].sum())
    below = np.cumsum(exactly[:correct][::-1])
    most = float((below / np.arange(1, correct + 1)).max()) if correct else 0.0
    return min(1.0, at_least + 2 * canaries * delta * most)


def _binomial(trials: int, chance: float) -> np.ndarray:
    """Return the probabilities of 0 to `trials` successes."""
    if chance == 1.0:
        return np.eye(trials + 1)[trials]
    choices = [math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1) for k in range(trials + 1)]
    successes = np.arange(trials + 1)
    return np.exp(np.array(choices) + successes * math.log(chance) + (trials - successes) * math.log1p(-chance))
