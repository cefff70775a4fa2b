import math

import pytest

from gradclip import QuantileRule, SpreadRule, SteadyRule
from gradclip._src.logs.replay import ThresholdRule


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("1.0", ThresholdRule("1.0", 1.0, None)),
        ("inf", ThresholdRule("inf", math.inf, None)),
        ("0", ThresholdRule("0", 0.0, None)),
        ("adaptive", ThresholdRule("adaptive", None, SpreadRule())),
        (
            "spread:window=64,quantile=0.2",
            ThresholdRule("spread:window=64,quantile=0.2", None, SpreadRule(window=64, quantile=0.2)),
        ),
        ("steady:factor=0.1", ThresholdRule("steady:factor=0.1", None, SteadyRule(factor=0.1))),
        ("quantile", ThresholdRule("quantile", None, QuantileRule())),
        (
            "quantile:factor=3,skip_above=2",
            ThresholdRule("quantile:factor=3,skip_above=2", None, QuantileRule(factor=3), 2.0),
        ),
        ("skip", ThresholdRule("skip", None, QuantileRule(), 4.0)),
        (
            "skip:skip_above=9,window=32",
            ThresholdRule("skip:skip_above=9,window=32", None, QuantileRule(window=32), 9.0),
        ),
        ("autoclip", ThresholdRule("autoclip", None, QuantileRule(factor=1.0, quantile=0.9, window=1000))),
        ("autoclip:quantile=0.5", ThresholdRule("autoclip:quantile=0.5", None, QuantileRule(1.0, 0.5, window=1000))),
    ],
)
def test_rules_as_users_write_them(text, rule):
    assert ThresholdRule.parse(text) == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-1", "a fixed threshold must not be negative or NaN, got -1"),
        ("nan", "must not be negative or NaN"),
        ("median", "there is no rule 'median'. A rule is a number, adaptive, spread, "),
        ("", "there is no rule ''"),
        ("quantile:foo=1", "the rule 'quantile:foo=1' has no setting 'foo'. It has factor, quantile, window, initial"),
        ("quantile:_fraction=1", "has no setting '_fraction'"),
        ("quantile:factor", "must be written like quantile:factor=3,window=64"),
        ("quantile:factor=x", "must be written like"),
        ("quantile:window=1.5", "window must be a whole number"),
        ("quantile:window=inf", "window must be a whole number"),
        ("quantile:quantile=2", "quantile must be from 0.0 to 1.0"),
        ("adaptive:skip_above=4", "the rule 'adaptive' cannot skip steps. Use quantile:skip_above=4 or skip"),
        ("steady:skip_above=4", "the rule 'steady' cannot skip steps. Use quantile:skip_above=4 or skip"),
        ("skip:skip_above=0.5", "skip_above must be from 1.0"),
    ],
)
def test_rules_that_are_refused(text, message):
    with pytest.raises((TypeError, ValueError)) as raised:
        ThresholdRule.parse(text)
    assert message in str(raised.value)
