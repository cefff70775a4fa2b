"""Every coefficient is one rule: what the kernels are given, what derivatives are taken of, and what elements get."""

import math
from fractions import Fraction

import numpy as np
import pytest

from gradclip._src.backends.host.backend import HOST
from gradclip._src.core.coefficient import coefficient
from gradclip._src.core.derivative import ClipRule
from gradclip._src.core.layouts import TREE
from gradclip._src.core.nonfinite import PROPAGATE
from gradclip._src.core.norms import Norm, Order
from gradclip._src.core.rules import CLIP, Rule, Target, rule_for_sums

ERROR = 40 * 2.0**-53
ROUNDING = 2.0**-53
TARGETS = {
    "clip": CLIP,
    "to unit": Target(1.0),
    "grid": Target(1e6, share=1.0 - 2.0**-30, integers=True),
    "normalize": Target(gamma=0.0),
    "automatic": Target(gamma=0.25),
    "automatic to unit": Target(1.0, gamma=0.25),
}
SHOWN = {
    "clip": lambda n, c: c / n if n > c else Fraction(1),
    "to unit": lambda n, c: 1 / max(n, c),
    "grid": lambda n, c: 10**6 / max(n, c * Fraction(1.0 - 2.0**-30)),
    "normalize": lambda n, c: c / n,
    "automatic": lambda n, c: c / (n + Fraction(1, 4)),
    "automatic to unit": lambda n, c: 1 / (n + Fraction(1, 4)),
}


def cases(count=20_000, seed=0):
    """Return norms and thresholds, some of them far apart, some equal but for the last bits."""
    rng = np.random.default_rng(seed)
    max_norms = 10.0 ** rng.uniform(-12, 12, count)
    norms = max_norms * 10.0 ** rng.uniform(-12, 12, count)
    near = rng.random(count) < 0.3
    norms[near] = max_norms[near] * (1.0 + rng.integers(-200, 200, near.sum()) * 2.0**-52)
    return norms, max_norms


def weights_of(rule, norms):
    upper = norms * rule.inflate + rule.offset
    return np.where(upper <= rule.keep_up_to, rule.kept, rule.numerator / upper)


@pytest.mark.parametrize("name", TARGETS)
def test_twenty_thousand_coefficients_are_those_of_the_rule(name):
    norms, max_norms = cases()
    target = TARGETS[name]
    with HOST.precision():
        found = coefficient(HOST, Norm(norms, None, ERROR, 0.0), max_norms, target, split=True)
        rule = rule_for_sums(np, target, max_norms, ERROR)
    weights = weights_of(rule, norms)
    kept = (norms * rule.inflate + rule.offset <= rule.keep_up_to) & target.keeps
    factors = found.weights(np)
    first = factors.first if factors.second is None else factors.first * factors.second
    assert found.keep.tolist() == kept.tolist()
    assert kept.any() == target.keeps
    # Each side multiplies once and divides once.
    assert (np.abs(weights / first - 1.0) <= 2 * 2 * ROUNDING + 2.0**-60).all()
    for n, c, k in zip(norms[:2000].tolist(), max_norms[:2000].tolist(), weights[:2000].tolist(), strict=True):
        exact = SHOWN[name](Fraction(n), Fraction(c))
        assert exact * Fraction(1 - 2 * ERROR - 20 * ROUNDING) <= Fraction(k) <= exact


@pytest.mark.parametrize("name", TARGETS)
def test_derivatives_are_taken_of_the_same_coefficient(name):
    norms, max_norms = cases(2000, seed=1)
    rule = ClipRule(Order(2.0), None, PROPAGATE, TARGETS[name], TREE)
    k = rule._multiplier(np, norms, max_norms).k
    for n, c, found in zip(norms.tolist(), max_norms.tolist(), k.tolist(), strict=True):
        assert math.isclose(found, SHOWN[name](Fraction(n), Fraction(c)), rel_tol=1e-15)


def test_weights_are_never_subnormal_and_zero_where_nothing_divides():
    rule = Rule(1.0, 0.0, 2.0, 1.0, 2.0)
    assert rule.weights(np, np.array([0.0, 2.0, 4.0, 1e308, math.inf])).tolist() == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert Rule(1.0, 0.0, -1.0, 0.0, 3.0).weights(np, np.array([0.0, 5e-308, 6.0])).tolist() == [0.0, 2.0**1022, 0.5]
