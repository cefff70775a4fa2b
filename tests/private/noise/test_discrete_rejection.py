"""The sampler of noise: each decision beside exact arithmetic, and the law of its draws beside the formula."""

import decimal
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats

from gradclip._src.private.noise import discrete
from gradclip._src.private.noise.discrete import target_of, with_noise
from gradclip._src.private.noise.draws import SeededDraws, SystemDraws

SCALES = [1.0, 3.7, 64.0, 1448.1, 2.0**20 * 1.979, 2.0**31, 1e15 / 7, 2.0**60]


class Given:
    """Words that are known, then those of a seed."""

    secure = False

    def __init__(self, *words):
        self.left, self.more, self.asked = list(words), SeededDraws(np.random.default_rng(5)), 0

    def words(self, count):
        self.asked += count
        given, self.left = self.left[:count], self.left[count:]
        return np.concatenate([np.array(given, np.uint64), self.more.words(count - len(given))])


def seeded(seed=0):
    return SeededDraws(np.random.default_rng(seed))


@pytest.mark.parametrize("scale", SCALES)
def test_no_acceptance_is_above_one(scale):
    target = target_of(scale)
    with mpmath.workdps(40):
        s, t = mpmath.mpf(scale), mpmath.mpf(2) ** target.bits
        assert t >= s * mpmath.log(2)
        assert t / 2 < s * mpmath.log(2) * (1 + mpmath.mpf(10) ** -6)
        assert target.shift >= (s * mpmath.log(2) / t) ** 2 / 2
        assert target.shift < (s * mpmath.log(2) / t) ** 2 / 2 + mpmath.mpf(10) ** -5
    assert target.bits <= 60


def chances(scale, size):
    k = np.arange(-size, size + 1)
    weights = np.exp(-(k**2) / (2 * scale**2))
    return weights / weights.sum()


@pytest.mark.parametrize("scale", [1.0, 1.5, 3.7])
@pytest.mark.parametrize("margin", [discrete._MARGIN, 0.5])
def test_each_integer_is_as_likely_as_it_should_be(scale, margin, monkeypatch):
    # With a margin of 1/2, exact arithmetic decides most attempts.
    monkeypatch.setattr(discrete, "_MARGIN", margin)
    count, size = (400_000 if margin < 0.1 else 5_000), math.ceil(3 * scale)
    found = with_noise(np.zeros(count, np.int64), scale, seeded())
    expected = chances(scale, 20 * math.ceil(scale))
    middle = expected.size // 2
    inside = expected[middle - size : middle + size + 1]
    counts = np.array([*(np.count_nonzero(found == k) for k in range(-size, size + 1)), (abs(found) > size).sum()])
    assert stats.chisquare(counts, count * np.append(inside, 1 - inside.sum())).pvalue > 1e-3
    # A law with a standard deviation that is off by 3% is found out.
    if margin < 0.1:
        wrong = chances(scale * 1.03, 20 * math.ceil(scale))[middle - size : middle + size + 1]
        assert stats.chisquare(counts, count * np.append(wrong, 1 - wrong.sum())).pvalue < 1e-12


@pytest.mark.parametrize("scale", SCALES)
def test_exact_arithmetic_decides_the_same(scale, monkeypatch):
    quick = with_noise(np.zeros(300, np.int64), scale, seeded(1))
    monkeypatch.setattr(discrete, "_decided", lambda target, u, v, k: (np.zeros(u.size, bool),) * 2)
    assert with_noise(np.zeros(300, np.int64), scale, seeded(1)).tolist() == quick.tolist()


@pytest.mark.parametrize("scale", [64.0, 2.0**20 * 1.979, 2.0**60])
def test_a_decision_at_once_is_right_close_to_the_border(scale):
    # Around each p, first bits that are off by a few parts in 2**31: those that are decided must be decided right.
    target, rng = target_of(scale), np.random.default_rng(2)
    u = rng.integers(0, 2**target.bits, 300)
    v = np.minimum(rng.geometric(0.5, 300) - 1, 3)
    with mpmath.workdps(40):
        borders = [
            mpmath.mpf(2) ** int(b)
            * mpmath.exp(-((mpmath.mpf(int(a) + (int(b) << target.bits)) / scale) ** 2) / 2 - mpmath.mpf(target.shift))
            for a, b in zip(u, v, strict=True)
        ]
        near = [int(p * (1 + mpmath.mpf(rng.uniform(-3, 3)) * 2**-30) * 2**53) for p in borders]
    k = np.minimum(np.array(near, np.uint64), np.uint64(2**53 - 1))
    yes, no = discrete._decided(target, u, v, k)
    assert 50 < (yes | no).sum() < 250
    assert not (yes & no).any()
    for place, p in enumerate(borders):
        assert not yes[place] or (int(k[place]) + 1) * mpmath.mpf(2) ** -53 <= p
        assert not no[place] or int(k[place]) * mpmath.mpf(2) ** -53 >= p


def test_a_word_of_zeros_goes_on_in_the_next(monkeypatch):
    target = target_of(64.0)
    assert discrete._one(Given(0, 8), target, 2**63 | 5, 0, 0) is None  # so far out that it is never accepted
    monkeypatch.setattr(discrete, "_below", lambda *args: True)
    for more, zeros in (((8,), 67), ((0, 1), 128), ((0, 0, 2**63), 64 * 3 + 63)):
        assert discrete._one(Given(*more), target, 2**63 | 5, 0, 0) == -(5 + (zeros << target.bits))


def test_bits_are_drawn_until_they_decide():
    gamma = Fraction(1, 3)
    with decimal.localcontext(decimal.Context(prec=60)):
        known = int(decimal.Decimal(2) ** 53 * (-decimal.Decimal(1) / 3).exp())
        rest = int(decimal.Decimal(2) ** 117 * (-decimal.Decimal(1) / 3).exp()) - (known << 64)
    for word, below in ((rest - 1, True), (rest + 1, False)):
        draws = Given(word)
        assert discrete._below(draws, known, 0, gamma) is below
        assert draws.asked == 1
    draws = Given(rest)
    discrete._below(draws, known, 0, gamma)
    assert draws.asked == 2


def test_bounds_of_exponentials_hold_what_they_bound():
    for gamma in (Fraction(0), Fraction(1, 3), Fraction(10**30 + 1, 10**28), Fraction(5000)):
        for digits in (10, 40):
            low, high = discrete._exp_bounds(gamma, digits)
            with mpmath.workdps(90):
                exact = mpmath.exp(-mpmath.mpf(gamma.numerator) / gamma.denominator)
                assert mpmath.mpf(low.numerator) / low.denominator <= exact
                assert exact <= mpmath.mpf(high.numerator) / high.denominator
            assert high - low <= high * Fraction(300) / 10 ** (digits - 1)


def test_zero_counts_once():
    # u = 0 and V = 0, accepted: with a plus it is 0, with a minus it is rejected.
    plus, minus = Given(0, 1, 0), Given(2**63, 1, 0)
    target = target_of(64.0)
    assert [piece.tolist() for piece in discrete._accepted(plus, target, 1)] == [[0]]
    assert [piece.tolist() for piece in discrete._accepted(minus, target, 1)] == [[]]
    for words, expected in (((0, 1, 0), 0), ((2**63, 1, 0), None), ((2**63 | 1, 1, 0), -1)):
        assert discrete._one(Given(), target, *words) == expected


@pytest.mark.parametrize("big", [2**63 - 1, -(2**63)])
def test_sums_of_any_size_become_the_nearest(big):
    values = np.array([big, 0, big, -1])
    for noise in (np.array([1, 1, -1, 2**61]), np.array([2**70, -(2**70), -(2**64), 5], object)):
        found = discrete._nearest_sums(values, noise)
        exact = [int(v) + int(z) for v, z in zip(values, noise, strict=True)]
        assert found.tolist() == [min(2**63 - 1, max(-(2**63), x)) for x in exact]
        assert found.dtype == np.int64


def test_every_value_keeps_its_place():
    values = np.arange(50_001) * 10**6
    found = with_noise(values, 64.0, SystemDraws())
    assert (abs(found - values) < 64 * 60).all()
    assert len(set((found - values).tolist())) > 200


@pytest.mark.parametrize("scale", [0.5, 0.72, 0.0, -5.0, math.inf, math.nan, 2.0**61])
def test_a_scale_for_which_the_proof_does_not_hold_is_refused(scale):
    with pytest.raises(ValueError, match=r"must be from 1 to 2\*\*60"):
        discrete.with_noise(np.arange(3), scale, seeded())


def test_narrow_integers_do_not_wrap():
    noised = discrete.with_noise(np.zeros(100, np.int32), 2.0**40, seeded())
    assert noised.dtype == np.int64
    assert np.abs(noised).max() > 2**31


def test_a_chance_that_is_flushed_to_zero_is_left_to_decimals():
    one = np.ones(1, np.int64)
    yes, no = discrete._decided(discrete.target_of(1.0), 0 * one, 39 * one, np.zeros(1, np.uint64))
    assert not yes[0]
    assert not no[0]


def test_traps_of_a_user_do_not_stop_the_noise(monkeypatch):
    monkeypatch.setitem(decimal.DefaultContext.traps, decimal.Inexact, True)
    low, high = discrete._exp_bounds(Fraction(1, 3), 40)
    assert low < Fraction(math.exp(-1 / 3)) + Fraction(1, 2**50)
    assert low < high
