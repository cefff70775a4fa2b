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
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from gradclip._src.per_example.quantities import as_count, as_number
from gradclip._src.per_example.rounding import rounded_up
from gradclip._src.private.binomial import smallest_size, tail_above
from gradclip._src.private.draws import check_seed, chosen, draws_from, shuffled

if TYPE_CHECKING:
    from gradclip._src.private.draws import Generator

_FINEST = 2**53
_RISK = 1e-12


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
    steps: int
    pad_to: int = field(default=None, kw_only=True)  # type: ignore[assignment]  # a number once it is made
    seed: "int | Generator | None" = field(default=None, kw_only=True)

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
        for name, value in {"n": n, "rate": rate, "steps": steps, "pad_to": pad_to, "_drawn": 0}.items():
            object.__setattr__(self, name, value)

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
        draws, threshold = draws_from(self.seed), int(self.rate * _FINEST)
        for _ in range(self.steps):
            examples = chosen(draws, self.n, threshold)
            places = shuffled(draws, max(self.pad_to, examples.size))[: examples.size]
            fit = places < self.pad_to
            indices, mask = np.zeros(self.pad_to, np.int64), np.zeros(self.pad_to, bool)
            indices[places[fit]] = examples[fit]
            mask[places[fit]] = True
            object.__setattr__(self, "_drawn", self.drawn + 1)
            yield indices, mask

    def __repr__(self) -> str:
        by = "the system's random numbers" if self.secure else "a seed, not secure"
        return (
            f"PoissonBatches(n={self.n}, rate={self.rate!r}, steps={self.steps}, pad_to={self.pad_to}), drawn by {by}"
        )
