"""The sampler of noise: each decision beside exact arithmetic, and the law of its draws beside the formula."""

import decimal
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats

from gradclip._src import native
from gradclip._src.private.noise import discrete
from gradclip._src.private.noise.discrete import target_of, with_noise
from gradclip._src.private.noise.draws import SeededDraws, SystemDraws
from host_arrays import IN_USE, VARIANTS

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
@pytest.mark.parametrize("how", ["kernels", "numpy", "exact"])
def test_each_integer_is_as_likely_as_it_should_be(scale, how, monkeypatch):
    if how != "kernels":
        monkeypatch.setattr(native, "kernels", None)
    if how == "exact":  # with a margin of 1/2, exact arithmetic decides most attempts
        monkeypatch.setattr(discrete, "_MARGIN", 0.5)
    count, size = (5_000 if how == "exact" else 400_000), math.ceil(3 * scale)
    found = with_noise(np.zeros(count, np.int64), scale, seeded())
    expected = chances(scale, 20 * math.ceil(scale))
    middle = expected.size // 2
    inside = expected[middle - size : middle + size + 1]
    counts = np.array([*(np.count_nonzero(found == k) for k in range(-size, size + 1)), (abs(found) > size).sum()])
    assert stats.chisquare(counts, count * np.append(inside, 1 - inside.sum())).pvalue > 1e-3
    # A law with a standard deviation that is off by 3% is found out.
    if how != "exact":
        wrong = chances(scale * 1.03, 20 * math.ceil(scale))[middle - size : middle + size + 1]
        assert stats.chisquare(counts, count * np.append(wrong, 1 - wrong.sum())).pvalue < 1e-12


def without_kernels(monkeypatch):
    monkeypatch.setattr(native, "kernels", None)


@pytest.mark.parametrize("scale", SCALES)
def test_kernels_numpy_and_exact_arithmetic_decide_the_same(scale, monkeypatch):
    assert native.kernels is not None
    count = 300 if scale == 2.0**60 else 100_000
    values = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, count)
    few, found = with_noise(values[:300], scale, seeded(1)), {}
    try:
        for variant in VARIANTS:
            native.kernels.use_variant(variant)
            found[variant] = with_noise(values, scale, seeded(1)).tolist()
    finally:
        native.kernels.use_variant(IN_USE)
    without_kernels(monkeypatch)
    expected = with_noise(values, scale, seeded(1)).tolist()
    assert [variant for variant, sums in found.items() if sums != expected] == []

    def nothing(target, first, second):
        return (np.zeros(first.size, np.int64), *(np.zeros(first.size, bool),) * 2)

    monkeypatch.setattr(discrete, "_decided", nothing)
    assert with_noise(values[:300], scale, seeded(1)).tolist() == few.tolist()


def by_kernels(target, first, second):
    """Decide attempts one by one: accepted and rejected ones, as `discrete._decided`."""
    yes, no = np.zeros(first.size, bool), np.zeros(first.size, bool)
    for place, words in enumerate(np.stack([first, second], 1)):
        sums = np.zeros(1, np.int64)
        used, filled = discrete._going_on(target, np.ascontiguousarray(words), np.zeros(1, np.int64), sums)((0, 0))
        yes[place], no[place] = filled == 1, used == 1 and filled == 0
    return None, yes, no


def attempt(target, u, v, k, minus=0):
    """Return the words of an attempt: after v zeros V's bits are ones."""
    bits = 63 - target.bits + (12 if target.bits >= 11 else 0)
    row = (1 << (bits - int(v))) - 1
    if target.bits >= 11:
        return minus << 63 | (row >> 12) << target.bits | int(u), int(k) << 12 | row & 4095
    return minus << 63 | row << target.bits | int(u), int(k) << 12


def words_of(target, *columns):
    pairs = [attempt(target, *row) for row in zip(*columns, strict=True)]
    return np.array(pairs, np.uint64).T.copy()


@pytest.mark.parametrize("decide", [discrete._decided, by_kernels])
@pytest.mark.parametrize("scale", [64.0, 2.0**20 * 1.979, 2.0**60])
def test_a_decision_at_once_is_right_close_to_the_border(scale, decide):
    # Around each p, first bits that are off by a few parts in 2**31: those that are decided must be decided right.
    target, rng = target_of(scale), np.random.default_rng(2)
    u = np.append(rng.integers(1, 2**target.bits, 290), 2**target.bits - np.arange(1, 11))
    v = np.minimum(rng.geometric(0.5, 300) - 1, 3)
    with mpmath.workdps(40):
        borders = [
            mpmath.mpf(2) ** int(b)
            * mpmath.exp(-((mpmath.mpf(int(a) + (int(b) << target.bits)) / scale) ** 2) / 2 - mpmath.mpf(target.shift))
            for a, b in zip(u, v, strict=True)
        ]
        near = [int(p * (1 + mpmath.mpf(rng.uniform(-3, 3)) * 2**-30) * 2**52) for p in borders]
    k = np.minimum(np.array(near, np.uint64), np.uint64(2**52 - 1))
    _, yes, no = decide(target, *words_of(target, u, v, k))
    assert 50 < (yes | no).sum() < 250
    assert not (yes & no).any()
    for place, p in enumerate(borders):
        assert not yes[place] or (int(k[place]) + 1) * mpmath.mpf(2) ** -52 <= p
        assert not no[place] or int(k[place]) * mpmath.mpf(2) ** -52 >= p


def test_where_all_bits_are_zero_more_are_drawn(monkeypatch):
    target = target_of(64.0)
    zeros = target.bits_of_v
    assert discrete._one(Given(0, 1), target, 2**63 | 5, 0) is None  # so far out that it is never accepted
    monkeypatch.setattr(discrete, "_below", lambda *args: True)
    for more, v in (((2**60,), zeros + 3), ((0, 2**63), zeros + 64), ((0, 0, 1), zeros + 64 * 2 + 63)):
        assert discrete._one(Given(*more), target, 2**63 | 5, 0) == -(5 + (v << target.bits))


@pytest.mark.parametrize("scale", [1.0, 1000.0, 2.0**11, 2.0**60])
def test_words_are_read_as_they_are_written(scale, monkeypatch):
    target = target_of(scale)
    monkeypatch.setattr(discrete, "_below", lambda draws, known, v, gamma: known == 7)
    for v in (0, 1, 3, 12, 14):
        for u, minus in ((2**target.bits - 1, 0), (2**target.bits // 2, 1)):
            z = u + (v << target.bits)
            expected = (-z or None) if minus else z  # 0 with a minus is rejected
            assert discrete._one(Given(), target, *attempt(target, u, v, 7, minus)) == expected
            assert discrete._one(Given(), target, *attempt(target, u, v, 8, minus)) is None


def test_bits_are_drawn_until_they_decide():
    gamma = Fraction(1, 3)
    with decimal.localcontext(decimal.Context(prec=60)):
        known = int(decimal.Decimal(2) ** 52 * (-decimal.Decimal(1) / 3).exp())
        rest = int(decimal.Decimal(2) ** 116 * (-decimal.Decimal(1) / 3).exp()) - (known << 64)
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


@pytest.mark.parametrize("kernels", [True, False])
def test_zero_counts_once(kernels, monkeypatch):
    # u = 0 and V = 0, accepted: with a plus it is 0, with a minus it is rejected.
    if not kernels:
        without_kernels(monkeypatch)
    target = target_of(64.0)
    for u, minus, expected in ((0, 0, 0), (0, 1, None), (1, 1, -1)):
        words = attempt(target, u, 0, 0, minus)
        assert discrete._one(Given(), target, *words) == expected
        sums, values = np.empty(1, np.int64), np.zeros(1, np.int64)
        filled = discrete._filled(Given(), target, np.array(words, np.uint64), values, sums, 0)
        assert sums[:filled].tolist() == ([] if expected is None else [expected])


@pytest.mark.parametrize("big", [2**63 - 1, -(2**63)])
def test_sums_of_any_size_become_the_nearest(big):
    values = np.array([big, 0, big, -1])
    noise = np.array([1, 1, -1, 2**61])
    found = discrete._nearest_sums(values, noise)
    exact = [int(v) + int(z) for v, z in zip(values, noise, strict=True)]
    assert found.tolist() == [min(2**63 - 1, max(-(2**63), x)) for x in exact]
    assert found.dtype == np.int64


@pytest.mark.parametrize("far", [2**70, -(2**70)])
def test_noise_beyond_int64_gives_the_nearest_sum(far, monkeypatch):
    monkeypatch.setattr(discrete, "_one", lambda *args: far)
    target, sums = target_of(64.0), np.zeros(2, np.int64)
    words = np.zeros(4, np.uint64)  # all bits of V are 0, which is never settled at once
    assert discrete._filled(Given(), target, words, np.array([5, -5]), sums, 0) == 2
    assert sums.tolist() == [2**63 - 1 if far > 0 else -(2**63)] * 2


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


@pytest.mark.parametrize("decide", [discrete._decided, by_kernels])
def test_a_chance_near_zero_is_left_to_decimals(decide):
    target = discrete.target_of(1.0)
    _, yes, no = decide(target, *words_of(target, [0, 0], [39, 39], [0, 1]))
    assert yes.tolist() == [False, False]
    assert no.tolist() == [False, True]


def test_traps_of_a_user_do_not_stop_the_noise(monkeypatch):
    monkeypatch.setitem(decimal.DefaultContext.traps, decimal.Inexact, True)
    low, high = discrete._exp_bounds(Fraction(1, 3), 40)
    assert low < Fraction(math.exp(-1 / 3)) + Fraction(1, 2**50)
    assert low < high
