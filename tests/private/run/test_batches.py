"""Poisson batches: who is in them, where, and how often they do not fit."""

import copy
import itertools
import math
import pickle
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from gradclip._src.private.run import batches as module
from gradclip._src.private.run.batches import PoissonBatches


class Words:
    """Gives out one word after the other."""

    secure = False

    def __init__(self, words):
        self.left = list(words)

    def words(self, count):
        taken, self.left = self.left[:count], self.left[count:]
        return np.array(taken, np.uint64)


def batch(words, monkeypatch, **settings):
    """Return the batch that is drawn from these words: the example at each place, None for an empty one."""
    monkeypatch.setattr(module, "draws_from", lambda seed: Words(words))
    [(indices, mask)] = PoissonBatches(steps=1, **settings)
    assert indices.dtype == np.int64
    assert mask.dtype == bool
    assert indices[~mask].tolist() == [0] * (~mask).sum()
    return tuple(i if taken else None for i, taken in zip(indices.tolist(), mask.tolist(), strict=True))


def every_batch(n, pad_to, monkeypatch):
    """Count the batches for all words of 2 bits, each example chosen with probability 1/2. Leave out equal keys."""
    found = Counter()
    for picks in itertools.product((0, 2**63), repeat=n):
        size = max(pad_to, picks.count(0))
        for keys in itertools.permutations(range(size)):
            found[batch((*picks, *keys), monkeypatch, n=n, rate=0.5, pad_to=pad_to)] += Fraction(
                1, math.factorial(size)
            )
    return found


def test_each_example_is_chosen_independently_and_all_places_are_equally_likely(monkeypatch):
    found = every_batch(2, 3, monkeypatch)
    assert found == {
        (None, None, None): 1,
        **{order: Fraction(1, 3) for e in (0, 1) for order in set(itertools.permutations((e, None, None)))},
        **{order: Fraction(1, 6) for order in itertools.permutations((0, 1, None))},
    }


def test_an_example_more_moves_nobody(monkeypatch):
    # Leave example 2 out of the batches of three examples: what remains are the batches of two.
    without = Counter()
    for places, weight in every_batch(3, 3, monkeypatch).items():
        without[tuple(None if example == 2 else example for example in places)] += weight / 2
    assert without == every_batch(2, 3, monkeypatch)


def test_a_batch_that_does_not_fit_keeps_a_random_part(monkeypatch):
    found = Counter()
    for keys in itertools.permutations(range(3)):
        found[batch((0, 0, 0, *keys), monkeypatch, n=3, rate=0.5, pad_to=2)] += 1
    assert found == dict.fromkeys(itertools.permutations(range(3), 2), 1)


def test_overflow_is_the_chance_of_any_batch_of_one_example_more():
    batches = PoissonBatches(n=5, rate=0.5, steps=3, pad_to=4)
    one = Fraction(6 + 1, 64)  # of six examples, five or six
    assert 3 * one <= Fraction(batches.overflow) <= 3 * one * (1 + Fraction(2) ** -51)
    assert PoissonBatches(n=5, rate=0.5, steps=1000, pad_to=4).overflow == 1.0
    assert PoissonBatches(n=5, rate=0.5, steps=1000, pad_to=6).overflow == 0.0


def test_pad_to_is_the_smallest_that_rarely_overflows():
    found = PoissonBatches(n=60_000, rate=256 / 60_000, steps=2_000)
    assert found.overflow <= 1e-12
    assert PoissonBatches(n=60_000, rate=256 / 60_000, steps=2_000, pad_to=found.pad_to - 1).overflow > 1e-12
    assert found.pad_to == 394
    assert PoissonBatches(n=3, rate=1.0, steps=1).pad_to == 4


def test_the_rate_is_what_is_drawn():
    assert PoissonBatches(n=4, rate=0.1, steps=1).rate == math.floor(Fraction(0.1) * 2**53) / 2**53
    assert PoissonBatches(n=4, rate=np.float32(0.1), steps=1).rate == float(np.float32(0.1))
    assert PoissonBatches(n=4, rate=Fraction(1, 3), steps=1).rate == (2**53 // 3) / 2**53
    assert PoissonBatches(n=4, rate=1, steps=1).rate == 1.0


def test_each_iteration_is_new_unless_an_int_is_the_seed():
    def drawn(batches):
        return [(i.tolist(), m.tolist()) for i, m in batches]

    settings = {"n": 200, "rate": 0.5, "steps": 3, "pad_to": 201}
    repeated = PoissonBatches(**settings, seed=7)
    assert drawn(repeated) == drawn(repeated)
    assert len(repeated) == len(drawn(repeated)) == 3
    assert drawn(repeated)[0] != drawn(repeated)[1]
    for seed in (None, np.random.default_rng(7)):
        again = PoissonBatches(**settings, seed=seed)
        assert drawn(again) != drawn(again)  # equal with probability far below 2**-600
    assert drawn(PoissonBatches(**settings, seed=np.random.default_rng(7))) == drawn(repeated)


def test_the_seed_is_told():
    secure = PoissonBatches(n=4, rate=0.5, steps=2, pad_to=3)
    assert repr(secure) == "PoissonBatches(n=4, rate=0.5, steps=2, pad_to=3), drawn by the system's random numbers"
    seeded = PoissonBatches(n=4, rate=0.5, steps=2, pad_to=3, seed=1)
    assert repr(seeded) == "PoissonBatches(n=4, rate=0.5, steps=2, pad_to=3), drawn by a seed, not secure"
    assert (secure.secure, seeded.secure) == (True, False)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"n": 0}, ValueError, "n must be a whole number, 1 or more, got 0"),
        ({"steps": 1.5}, ValueError, "steps must be a whole number, 1 or more, got 1.5"),
        ({"pad_to": 0}, ValueError, "pad_to must be a whole number, 1 or more, got 0"),
        ({"rate": 0.0}, ValueError, "rate must be a probability, above 0 and at most 1, got 0.0"),
        ({"rate": 1.5}, ValueError, "rate must be a probability, above 0 and at most 1, got 1.5"),
        ({"rate": math.nan}, ValueError, "rate must be a probability, above 0 and at most 1, got nan"),
        ({"rate": 2**-54}, ValueError, r"rate must be at least 2\*\*-53"),
        ({"rate": "0.5"}, TypeError, "rate must be a number, got '0.5' of type str"),
        ({"seed": "1"}, TypeError, "seed must be None for the system's random numbers"),
    ],
)
def test_bad_settings(settings, error, text):
    with pytest.raises(error, match=text):
        PoissonBatches(**{"n": 4, "rate": 0.5, "steps": 2, **settings})


def test_batches_count_what_they_draw():
    batches = PoissonBatches(100, 0.1, steps=3)
    assert batches.drawn == 0
    next(iter(batches))
    assert [batches.drawn for _ in batches] == [2, 3, 4]
    assert [other.drawn for other in (copy.copy(batches), pickle.loads(pickle.dumps(batches)), replace(batches))] == [
        0
    ] * 3
    assert batches == PoissonBatches(100, 0.1, steps=3)
