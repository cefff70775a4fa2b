"""The threshold that falls where norms vary: its formula, and the theorem that it recovers."""

import math
from fractions import Fraction

import numpy as np
import pytest

import gradclip
from gradclip import AdaptiveThreshold, QuantileRule, SpreadRule, SteadyRule
from gradclip._src.thresholds.below_usual import rule_given
from norms_in_turn import SPREAD_RULES, clamped, fed, on_a_level


def by_the_formula(rule, norms):
    """Return the threshold after finite positive norms, as the docstring has it, in exact arithmetic."""
    last = sorted(map(Fraction, norms[-rule.window :]))
    low, middle = (last[max(1, math.ceil(Fraction(repr(share)) * len(last))) - 1] for share in (rule.quantile, 0.5))
    found = Fraction(rule.factor) * middle * max(low / middle, Fraction(1, 4)) ** 2
    return float(min(max(found, Fraction(rule.lower)), Fraction(min(rule.upper, 1e300))))


def test_no_rule_is_another():
    rules = (SpreadRule, SteadyRule, QuantileRule)
    assert [(a, b) for a in rules for b in rules if issubclass(a, b) and a is not b] == []


@pytest.mark.parametrize("rule", SPREAD_RULES, ids=lambda rule: f"{rule.quantile}-{rule.window}")
@pytest.mark.parametrize("shape", [(), (1,)], ids=["number", "array"])
@pytest.mark.parametrize("like", [np.zeros((), np.float32), np.zeros(())], ids=["float32", "float64"])
def test_it_is_the_formula(rule, shape, like):
    rng, history, seen = np.random.default_rng(5), rule.init(like, shape), []
    for norm in (rng.exponential(size=300) + rng.choice([0.0, 10.0], 300)).astype(np.float32).tolist():
        history = rule.observe(history, norm if shape == () else np.full(shape, norm))
        seen.append(norm)
        found = np.ravel(rule.max_norm(history))[0]
        assert found == pytest.approx(by_the_formula(rule, seen), rel=float(8 * np.finfo(like.dtype).eps))
        assert found.dtype == like.dtype


def test_the_threshold_of_equal_norms_is_their_level():
    rule = SpreadRule()
    assert rule.max_norm(fed(rule, rule.init(), [3.0] * 300)) == 3.0


def test_norms_that_vary_more_than_fourfold_have_the_least_threshold():
    rule = SpreadRule()
    for low in (0.25, 0.1, 1e-30):
        assert rule.max_norm(fed(rule, rule.init(), [low, 1.0, 1.0] * 200)) == 1.0 / 16


@pytest.mark.parametrize("rule", SPREAD_RULES, ids=lambda rule: f"{rule.quantile}-{rule.window}")
def test_after_k_norms_on_a_level_the_threshold_is_that_levels(rule):
    low, high, history = on_a_level(rule)
    threshold, rounding = rule.max_norm(history), 1 + 1e-6
    least = low * np.maximum(low / high, 0.25) ** 2
    assert (clamped(rule, least) <= threshold * rounding).all()
    assert (threshold <= clamped(rule, high) * rounding).all()


def test_the_defaults_recover_within_231_steps_and_not_sooner():
    rule = SpreadRule()
    assert rule.recovery_steps == 231
    for steps, found in ((230, 1 / 16), (231, 1.0)):
        assert rule.max_norm(fed(rule, rule.init(), [1e-6] * 256 + [1.0] * steps)) == found


def test_thresholds_of_the_least_norm_kept_are_normal():
    rule = SpreadRule()
    history = rule.init()
    for norm in (2.0**-126, 2.0**-122, 2.0**-121, 2.0**-120, 2.0**-100):
        history = rule.observe(history, norm)
        assert int(history.count) == 0 or float(rule.max_norm(history)) >= 2.0**-126
    assert 1 <= int(history.count) < 5


def test_one_norm_on_the_host_takes_the_short_way(monkeypatch):
    from gradclip._src.thresholds import following

    rule = SpreadRule(factor=3.0, window=4)
    history = fed(rule, rule.init(), [1.0, 0.3, 2.0, 1.7])
    expected = rule.max_norm(fed(rule, rule.init(shape=(1,)), [[1.0], [0.3], [2.0], [1.7]]))
    monkeypatch.setattr(following, "namespace_of", None)
    assert [rule.max_norm(history)] == expected


def test_a_large_factor_of_the_least_norms_is_no_zero():
    import jax.numpy as jnp

    rule, norms = SpreadRule(factor=2.0**20), [2.0**-126, 2.0**-125, 2.0**-125]
    for like in (np.zeros((), np.float32), jnp.zeros(())):
        assert float(rule.max_norm(fed(rule, rule.init(like), norms))) == 2.0**-107


def test_a_quantile_above_the_median_is_an_error():
    with pytest.raises(ValueError, match=r"quantile must be at most 0.5, got 0.6"):
        SpreadRule(quantile=0.6)


def test_the_default_rule_depends_on_whether_steps_are_skipped():
    assert rule_given(None, skips=False) == SpreadRule() == AdaptiveThreshold().rule
    assert rule_given(None, skips=True) == QuantileRule() == AdaptiveThreshold(skip_above=4.0).rule
    assert rule_given(QuantileRule(window=3), skips=True).window == 3


@pytest.mark.parametrize(
    "make", [lambda rule: AdaptiveThreshold(rule, skip_above=2.0), lambda rule: rule_given(rule, skips=True)]
)
def test_skipping_above_a_threshold_below_the_usual_norm_is_an_error(make):
    with pytest.raises(ValueError, match=r"Pass rule=gradclip.QuantileRule\(\), or leave rule out"):
        make(SpreadRule())


def test_the_transformations_of_optax_say_the_same():
    import jax.numpy as jnp
    import optax

    from gradclip.integrations.optax import adaptive_clip_by_global_norm, skip_spikes

    for make in (
        lambda rule: adaptive_clip_by_global_norm(rule, skip_above=4.0),
        lambda rule: skip_spikes(optax.sgd(1.0), rule),
    ):
        with pytest.raises(ValueError, match="skip_above needs a threshold above the usual norm"):
            make(gradclip.SpreadRule())
    transform, rule = adaptive_clip_by_global_norm(), SpreadRule()
    state, history = transform.init({"w": jnp.zeros(2)}), rule.init()
    for norm in (5.0, 10.0, 2.5, 20.0):
        _, state = transform.update({"w": jnp.array([0.6 * norm, 0.8 * norm])}, state)
        assert float(state.max_norm) == float(rule.max_norm(history))
        history = rule.observe(history, float(state.norm))
