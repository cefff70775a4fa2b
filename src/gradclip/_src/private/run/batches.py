"""`PoissonBatches`: batches sampled as the accountants of private training assume, padded to one size.

Each example is in a batch with probability q, independently of the others. A batch has `pad_to` places, and the chosen
examples get different places, each assignment equally likely.

Why the places are random. Take data sets D and D' = D + {x}. Given the batch of D, the examples of D in a batch of D'
are chosen with the same probabilities, and as long as both fit, their places have the same distribution: a uniform
assignment of places to some examples is uniform for any part of them. So both runs can be drawn together: the same
examples in the same places, and for D', with probability q, also x in a place that is empty for D. That is what
`sensitivity("add_or_remove_one")` compares, and what accountants call a Poisson subsampled mechanism.

A batch that does not fit keeps a random part of its examples. Let beta bound the probability that any batch of the run
does not fit, for D and for D'. Each run differs from one with unlimited batches in total variation by at most beta.

P(X > m) for X ~ Binomial(n, q) is the sum of t_k = C(n, k) q**k (1 - q)**(n - k) over k > m. Consecutive terms have
the ratio (n - k) / (k + 1) * q / (1 - q), which falls with k. So once a ratio r is below 1, the terms after t_k add up
to at most t_k * r / (1 - r). Decimals have 60 digits and are rounded up. A factor of 1 + 1e-30 in the end is more than
what two powers and 1e25 further operations round.
"""

import decimal
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from gradclip._src.private.noise.draws import Draws, check_seed, chosen, draws_from, shuffled
from gradclip._src.private.sums.rounding import rounded_up
from gradclip._src.private.sums.settings import as_count, as_number
from gradclip._src.public import public
from gradclip._src.words import advised

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


_FINEST = 2**53
_RISK = 1e-12


@public
@advised
@dataclass(frozen=True, repr=False)
class PoissonBatches:
    """Batches of a data set by Poisson sampling: each example is in each batch with probability `rate`.

    Iterate to get `steps` pairs `(indices, mask)`, the same number of places in each: `indices`, int64 of shape
    (pad_to,), and `mask`, booleans of shape (pad_to,). Take `x[indices]`, and pass `mask` to the clipped function. In
    an empty place the mask is False and the index is 0, so that it can be taken as well: without the mask, example 0
    would be in every batch, many times. Each iteration draws new batches. Processes that share a data set must share
    the batches: draw on one, and send them. Or give each its own part of the data, and `PoissonBatches` of its size.

    Args:
        n: the number of examples, or of groups with `unit="group"`.
        rate: the probability, above 0 and at most 1. It is rounded down to a multiple of 2**-53, and exactly that is
            drawn: give `.rate` to an accountant. The expected number of examples in a batch is n * rate.
        steps: the number of batches.
        pad_to: the number of places in a batch. None: the smallest for which `overflow` is at most 1e-12. A batch that
            does not fit keeps a random part of its examples.
        seed: None draws from the operating system's cryptographic generator. An int or a `numpy.random.Generator`
            makes runs repeatable, and private only from those who do not know it. An int repeats the same batches in
            each iteration.

    `rate`, `steps` and `pad_to` are public. If the number of examples is a secret itself, choose them without it, and
    pass `pad_to`.

    Raises:
        ValueError: a count below 1, a rate that is not above 0 and at most 1. TypeError: a rate that is not a number,
        a seed of another type.

    Accountants assume this sampling since Abadi et al. 2016, "Deep Learning with Differential Privacy".

    >>> batches = PoissonBatches(n=4, rate=1.0, steps=2, pad_to=5)
    >>> [(sorted(indices[mask].tolist()), mask.sum()) for indices, mask in batches]
    [([0, 1, 2, 3], np.int64(4)), ([0, 1, 2, 3], np.int64(4))]
    >>> batches.overflow  # 5 places are enough, also for a data set of 5 examples
    0.0
    """

    n: int
    rate: float
    steps: int = field(kw_only=True)
    pad_to: int = field(default=None, kw_only=True)  # type: ignore[assignment]  # a number once it is made
    seed: int | np.random.Generator | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        n, steps = as_count("n", self.n), as_count("steps", self.steps)
        given = as_number("rate", self.rate)
        if not 0 < given <= 1:
            raise ValueError(f"rate must be a probability, above 0 and at most 1, got {self.rate!r}.")
        check_seed(self.seed)
        exact = self.rate if isinstance(self.rate, Fraction) else Fraction(given)
        threshold = math.floor(exact * _FINEST)
        if not threshold:
            raise ValueError(f"rate must be at least 2**-53, got {self.rate!r}: no example would ever be chosen.")
        rate = threshold / _FINEST
        pad_to = smallest_size(n + 1, rate, steps, _RISK) if self.pad_to is None else as_count("pad_to", self.pad_to)
        settled = {"n": n, "rate": rate, "steps": steps, "pad_to": pad_to}
        for name, value in (settled | {"_drawn": 0, "_next": (0, 0)}).items():
            object.__setattr__(self, name, value)

    def _begin_at(self, step: int, skipped: int, generator: dict[str, Any] | None = None) -> None:
        """Let the next iteration begin at a step, after so many batches of a seed, of which nothing is released."""
        if isinstance(self.seed, np.random.Generator) and generator is not None:
            self.seed.bit_generator.state = generator
        object.__setattr__(self, "_next", (step, 0 if self.secure else skipped))

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_drawn": 0}  # a copy has drawn none

    @property
    def drawn(self) -> int:
        """How many batches were drawn from this object, in all iterations of this process."""
        return int(self.__dict__["_drawn"])

    @property
    def secure(self) -> bool:
        """Whether batches are drawn from the operating system's cryptographic generator."""
        return self.seed is None

    @cached_property
    def overflow(self) -> float:
        """A bound on the probability that any of the batches does not fit into `pad_to` places, rounded up.

        It holds for data sets of up to n + 1 examples, so for both of two neighbors: `steps` times the tail of a
        binomial distribution, computed in decimals of 60 digits.
        """
        one = tail_above(self.n + 1, self.rate, self.pad_to)
        return min(1.0, rounded_up(self.steps * Fraction(one)))

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        draws, (first, skipped) = draws_from(self.seed), self.__dict__["_next"]
        object.__setattr__(self, "_next", (0, 0))
        for _ in range(skipped):
            self._batch(draws)
        for _ in range(first, self.steps):
            batch = self._batch(draws)
            object.__setattr__(self, "_drawn", self.drawn + 1)
            yield batch

    def _batch(self, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
        examples = chosen(draws, self.n, int(self.rate * _FINEST))
        places = shuffled(draws, max(self.pad_to, examples.size))[: examples.size]
        fit = places < self.pad_to
        indices, mask = np.zeros(self.pad_to, np.int64), np.zeros(self.pad_to, bool)
        indices[places[fit]] = examples[fit]
        mask[places[fit]] = True
        return indices, mask

    def __repr__(self) -> str:
        by = "the system's random numbers" if self.secure else "a seed, not secure"
        return (
            f"PoissonBatches(n={self.n}, rate={self.rate!r}, steps={self.steps}, pad_to={self.pad_to}), drawn by {by}"
        )
