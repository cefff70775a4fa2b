"""How likely more examples are chosen than a batch has places: a tail of the binomial distribution, never too small.

P(X > m) for X ~ Binomial(n, q) is the sum of t_k = C(n, k) q**k (1 - q)**(n - k) over k > m. Consecutive terms have
the ratio (n - k) / (k + 1) * q / (1 - q), which falls with k. So once a ratio r is below 1, the terms after t_k add up
to at most t_k * r / (1 - r). Decimals have 60 digits and are rounded up. A factor of 1 + 1e-30 in the end is more than
what two powers and 1e25 further operations round.
"""

import decimal
import math
from decimal import Decimal
from fractions import Fraction

from gradclip._src.per_example.rounding import rounded_up

_UP = decimal.Context(
    prec=60,
    rounding=decimal.ROUND_CEILING,
    Emin=decimal.MIN_EMIN,
    Emax=decimal.MAX_EMAX,
    traps=[decimal.InvalidOperation],
)
_SLACK = Decimal("1e-30")


def tail_above(trials: int, chance: float, most: int) -> float:
    """Return an upper bound on the probability that more than `most` of the trials succeed.

    `chance` is a multiple of 2**-53, above 0. The bound is at most 1 + 1e-29 times the probability, then rounded up to
    float64.

    >>> round(tail_above(2, 0.5, 1), 12)
    0.25
    """
    return rounded_up(Fraction(_tail(trials, chance, most)))


def smallest_size(trials: int, chance: float, times: int, risk: float) -> int:
    """Return the smallest m for which `times` times the probability of more than m successes is at most `risk`."""

    def fits(most: int) -> bool:
        return times * Fraction(_tail(trials, chance, most)) <= Fraction(risk)

    low = max(0, math.floor(trials * chance) - 1)
    step = 1 + math.isqrt(low + 1)
    high = low + step
    while not fits(high):
        low, step = high, 2 * step
        high = low + step
    low = low if not fits(low) else -1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return max(1, high)


def _tail(trials: int, chance: float, most: int) -> Decimal:
    if most >= trials:
        return Decimal(0)
    with decimal.localcontext(_UP):
        q = Decimal(chance)
        p = 1 - q  # exact: both are multiples of 2**-53
        if not p:
            return Decimal(1)
        k = most + 1
        term = q**k * p ** (trials - k)
        for i in range(1, k + 1):
            term = term * (trials - k + i) / i
        total, odds = term, q / p
        while k < trials:
            ratio = odds * (trials - k) / (k + 1)
            if ratio < 1 and (rest := term * ratio / (1 - ratio)) < total * _SLACK:
                total += rest
                break
            term *= ratio
            total += term
            k += 1
        return min(total * (1 + _SLACK), Decimal(1))
