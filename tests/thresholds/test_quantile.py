"""The threshold that follows: what it is, and the theorem on what it cannot be led to."""

import math
from fractions import Fraction

import numpy as np
import pytest

from gradclip import QuantileRule
from norms_in_turn import RULES, clamped, fed, on_a_level


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.quantile}-{rule.window}")
def test_after_k_norms_on_a_level_the_threshold_is_that_levels(rule):
    """20,000 hostile histories, each followed by K norms of a level with junk between them."""
    low, high, history = on_a_level(rule)
    threshold = rule.max_norm(history)
    assert (clamped(rule, low) <= threshold).all()
    assert (threshold <= clamped(rule, high)).all()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.quantile}-{rule.window}")
def test_one_step_less_does_not_suffice(rule):
    led = []
    for foreign in (1e-20, 1e20):
        history = fed(rule, rule.init(), [foreign] * rule.window + [1.0] * (rule.recovery_steps - 1))
        led.append(rule.max_norm(history) != clamped(rule, 1.0))
        assert rule.max_norm(rule.observe(history, 1.0)) == clamped(rule, 1.0)
    assert any(led)


def test_the_defaults_recover_within_65_steps():
    assert QuantileRule().recovery_steps == 65
    assert [QuantileRule(quantile=q, window=100).recovery_steps for q in (0.0, 0.1, 0.5, 0.95, 1.0)] == [
        *(100, 91, 51, 95, 100)
    ]


@pytest.mark.parametrize("quantile", [0.0, 0.07, 0.1, 1 / 3, 0.5, 0.9, 0.95, 1.0])
def test_it_is_a_lower_quantile_of_the_last_norms(quantile):
    rule = QuantileRule(factor=1.0, quantile=quantile, window=30)
    rng, history, seen = np.random.default_rng(1), rule.init(), []
    for norm in rng.exponential(size=70).astype(np.float32):
        history = rule.observe(history, norm)
        seen.append(norm)
        expected = np.quantile(seen[-30:], round(quantile, 6), method="inverted_cdf")
        assert rule.max_norm(history) == expected


def test_a_decimal_means_itself():
    """0.07 * 100 is above 7 in floating point, and would ask for the eighth."""
    rule = QuantileRule(factor=1.0, quantile=0.07, window=100)
    assert rule.max_norm(fed(rule, rule.init(), map(float, range(1, 101)))) == 7.0


def test_the_first_step_and_the_bounds():
    rule = QuantileRule(initial=5.0, lower=0.5, upper=10.0)
    history = rule.init()
    assert rule.max_norm(history) == 5.0
    assert rule.max_norm(rule.observe(history, 1.0)) == 2.0
    assert rule.max_norm(rule.observe(history, 0.1)) == 0.5
    assert rule.max_norm(rule.observe(history, 100.0)) == 10.0
    assert QuantileRule().max_norm(QuantileRule().init()) == math.inf
    assert QuantileRule(upper=1.0).max_norm(QuantileRule(upper=1.0).init()) == 1.0
    # The bound as float32 has it is not above the bound.
    assert float(QuantileRule(upper=0.1).max_norm(QuantileRule(upper=0.1).init())) <= 0.1


def test_first_thresholds_may_be_beyond_float32():
    rule = QuantileRule(initial=1e300)
    assert rule.max_norm(rule.init()) == np.finfo(np.float32).max
    assert rule.max_norm(rule.init(np.zeros(()))) == 1e300
    assert rule.max_norm(rule.init(shape=(2,))).tolist() == [np.finfo(np.float32).max] * 2


def test_what_was_there_is_not_written():
    rule = QuantileRule(window=2)
    history = rule.observe(rule.init(), 1.0)
    before = history.norms.copy()
    rule.observe(history, 2.0)
    np.testing.assert_array_equal(history.norms, before)


@pytest.mark.parametrize(("dtype", "off"), [(np.float32, 1.2e-7), (np.float64, 2.3e-16)])
def test_the_threshold_is_as_near_to_the_product_as_is_said(dtype, off):
    rng = np.random.default_rng(4)
    for factor in (2.1, 1.1, 1 / 3, *np.exp(rng.uniform(-4, 4, 20)).tolist()):
        rule, least = QuantileRule(factor=factor, window=1), 0
        for norm in np.exp(rng.uniform(-9, 9, 50)).astype(dtype).tolist():
            threshold = rule.max_norm(rule.observe(rule.init(np.zeros((), dtype)), norm))
            exact = Fraction(factor) * Fraction(norm)
            assert abs(Fraction(float(threshold)) - exact) <= Fraction(off) * exact
            least = min(least, Fraction(float(threshold)) / exact - 1)
    assert least < 0  # it may be below factor * norm


# What is refused


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"factor": 0.0}, ValueError, "factor must be from"),
        ({"factor": math.nan}, ValueError, "factor must be from"),
        ({"factor": "2"}, TypeError, "factor must be a number, got '2' of type str"),
        ({"quantile": 1.5}, ValueError, "quantile must be from 0.0 to 1.0, got 1.5"),
        ({"quantile": True}, TypeError, "quantile must be a number"),
        ({"window": 0}, ValueError, "window must be from 1 to 32768, got 0"),
        ({"window": 2**15 + 1}, ValueError, "window must be from 1 to 32768"),
        ({"window": 2.0}, TypeError, "window must be a whole number"),
        ({"initial": -1.0}, ValueError, "initial must be from 0.0 to inf"),
        ({"lower": math.nan}, ValueError, "lower must be from"),
        ({"lower": 2.0, "upper": 1.0}, ValueError, r"lower must not be above upper, got lower=2.0 and upper=1.0"),
    ],
)
def test_settings_are_checked(settings, kind, words):
    with pytest.raises(kind, match=words):
        QuantileRule(**settings)


def test_a_history_is_like_an_array():
    with pytest.raises(
        TypeError, match=r"like must be an array of NumPy, PyTorch, JAX, TensorFlow or MLX, got 'cpu' of type str"
    ):
        QuantileRule().init("cpu")


def test_rules_are_values():
    assert QuantileRule() == QuantileRule(factor=2, quantile=np.float64(0.5), window=np.int64(128))
    assert hash(QuantileRule()) == hash(QuantileRule())
    assert "_fraction" not in repr(QuantileRule())


def test_a_history_is_the_rules_own():
    for shape in ((), (2,)):
        history = QuantileRule(window=8).init(shape=shape)
        for call in (QuantileRule(window=4).max_norm, lambda h: QuantileRule(window=4).observe(h, 1.0)):
            with pytest.raises(ValueError, match=r"history holds 8 norms, but this rule's window is 4"):
                call(history)
