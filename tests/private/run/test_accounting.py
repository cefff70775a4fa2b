import math
import sys
import time

import numpy as np
import pytest
from dp_accounting import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)
from dp_accounting.pld import PLDAccountant
from scipy import stats
from scipy.optimize import brentq

import fresh_process
from gradclip._src.private.run import accounting
from gradclip._src.private.run.accounting import epsilon, multiplier_on_integers, noise_multiplier

RUNS = [(0.01, 1000, 1.0, 1e-5), (0.1, 60, 1.0, 1e-5), (0.004, 10_000, 0.7, 1e-6), (0.25, 200, 3.0, 1e-5)]


def of_gaussian(mu, delta):
    """Return epsilon of one Gaussian mechanism, whose means are mu standard deviations apart (Balle and Wang 2018)."""

    def gap(eps):
        return math.exp(stats.norm.logcdf(mu / 2 - eps / mu)) - math.exp(eps + stats.norm.logcdf(-mu / 2 - eps / mu))

    return brentq(lambda eps: gap(eps) - delta, 0, 200, xtol=1e-12)


def by_library(event, steps, delta):
    return PLDAccountant().compose(SelfComposedDpEvent(event, steps)).get_epsilon(delta)


@pytest.mark.parametrize(("rate", "steps", "multiplier", "delta"), RUNS)
def test_epsilon_is_that_of_dp_accounting(rate, steps, multiplier, delta):
    theirs = by_library(PoissonSampledDpEvent(rate, GaussianDpEvent(multiplier)), steps, delta)
    assert theirs <= epsilon(rate, steps, multiplier, delta) <= theirs * (1 + 1e-4)


@pytest.mark.parametrize("steps", [1, 100, 10_000, 1_000_000])
@pytest.mark.parametrize("delta", [1e-10, 1e-8, 1e-5])
def test_without_sampling_epsilon_is_that_of_one_gaussian(steps, delta):
    exact = of_gaussian(1.0, delta)
    if steps == 1_000_000 and delta == 1e-10:  # below what is kept for the arithmetic of so many steps
        assert epsilon(1.0, steps, math.sqrt(steps), delta) == math.inf
        delta, exact = 1e-9, of_gaussian(1.0, 1e-9)
    assert exact <= epsilon(1.0, steps, math.sqrt(steps), delta) <= exact * (1.05 if delta <= 1e-9 else 1.002)


def test_the_library_alone_is_too_small_at_small_delta():
    # By how much depends on the processor's order of additions.
    event = PoissonSampledDpEvent(1.0, GaussianDpEvent(100.0))
    assert by_library(event, 10_000, 1e-13) < 0.999 * of_gaussian(1.0, 1e-13)


@pytest.mark.parametrize(("rate", "steps", "multiplier", "delta"), RUNS[:2])
def test_epsilon_is_near_that_of_opacus(rate, steps, multiplier, delta):
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(multiplier, rate, steps)]
    theirs = accountant.get_epsilon(delta, eps_error=0.01)
    # Theirs is above the exact value by at most eps_error twice.
    assert theirs - 0.021 <= epsilon(rate, steps, multiplier, delta) <= theirs + 1e-3


def chance(n, rate, steps, pad_to):
    return steps * stats.binom.sf(pad_to, n + 1, rate)


def test_an_account_of_what_truncation_does_is_no_higher():
    # dp-accounting knows what a random part of the examples reveals: the bound by the overflow is only looser.
    n, rate, steps, multiplier, delta = 1000, 0.1, 100, 3.0, 1e-5
    plain = epsilon(rate, steps, multiplier, delta)
    for pad_to in (160, 165, 175):
        overflow = chance(n, rate, steps, pad_to)
        ours = epsilon(rate, steps, multiplier, delta, overflow=overflow)
        theirs = by_library(TruncatedSubsampledGaussianDpEvent(n + 1, rate, pad_to, multiplier), steps, delta)
        assert plain <= ours
        assert theirs <= ours * (1 + 1e-9)
        assert ours <= plain * (1 + 1e-5 + 40 * overflow / delta)
        if pad_to == 175:
            assert ours <= theirs * 1.0001


def test_overflow_that_no_delta_pays_for():
    assert epsilon(0.01, 100, 1.0, 1e-5, overflow=5e-6) == math.inf
    assert epsilon(0.01, 100, 1.0, 1e-5, overflow=1.0) == math.inf
    with pytest.raises(ValueError, match=r"no noise .* keeps epsilon=3\. .* pass a larger pad_to, or a larger delta"):
        noise_multiplier(0.01, 100, 3.0, 1e-5, overflow=5e-6)


def test_a_tiny_overflow_counts_at_a_huge_epsilon():
    # e**904 * 1e-310 is far above 1.
    assert 900 < epsilon(1.0, 1, 0.026, 1e-5) < 910
    assert epsilon(1.0, 1, 0.026, 1e-5, overflow=1e-310) == math.inf


def test_overflow_adds_what_the_proof_says():
    # For one release without sampling, delta at epsilon is known: it must leave (1 + e**eps) * overflow of 1e-5.
    found = epsilon(1.0, 1, 1.0, 1e-5, overflow=1e-8)
    left = 1e-5 - (1 + math.exp(found)) * 1e-8
    assert of_gaussian(1.0, left) <= found <= of_gaussian(1.0, left) * 1.0005


@pytest.mark.parametrize(
    ("rate", "steps", "target", "delta"),
    [
        (0.25, 200, 5.0, 1e-5),
        (0.1, 60, 1.0, 1e-5),
        (1.0, 1, 0.5, 1e-5),
        (0.001, 50, 8.0, 1e-6),
    ],
)
def test_noise_for_an_epsilon_is_the_least_of_four_digits(rate, steps, target, delta):
    found = noise_multiplier(rate, steps, target, delta, overflow=1e-12)
    assert found == float(f"{found:.5g}")
    assert epsilon(rate, steps, found, delta, overflow=1e-12) <= target
    assert epsilon(rate, steps, found * (1 - 1e-3), delta, overflow=1e-12) > target


@pytest.mark.parametrize("target", [1e-3, 1e-4, 1e-6])
def test_noise_for_a_small_epsilon(target):
    found = noise_multiplier(1.0, 1, target, 1e-5)
    assert epsilon(1.0, 1, found, 1e-5) <= target
    assert epsilon(1.0, 1, found * (1 - 1e-3), 1e-5) > target
    assert of_gaussian(1 / found, 1e-5) <= target


def test_delta_may_be_larger_than_the_chance_to_be_drawn():
    with pytest.raises(ValueError, match=r"even noise of 2\*\*-10 times the sensitivity keeps epsilon=1 at this delta"):
        noise_multiplier(1e-6, 1, 1.0, 1e-5)
    assert epsilon(1e-6, 1, 2.0**-10, 1e-5) == pytest.approx(0.0, abs=1e-50)


@pytest.mark.parametrize("multiplier", [1e150, 1e160, 1e200, 1.7e308])
def test_noise_beyond_all_measure_hides_everything(multiplier):
    assert 0.0 <= epsilon(0.01, 100, multiplier, 1e-5) < 1e-50


@pytest.mark.parametrize("multiplier", [5e-324, 1e-200])
def test_noise_below_all_measure_hides_nothing(multiplier):
    assert epsilon(0.01, 100, multiplier, 1e-5) == math.inf


def test_hardly_any_noise_hides_nothing():
    assert epsilon(1.0, 10**12, 1.0, 1e-5) == math.inf
    assert epsilon(0.5, 3, 1e-5, 1e-5) == math.inf


BASE = {"rate": 0.02, "steps": 200, "noise_multiplier": 1.0, "overflow": 1e-9}
WORSE = {"rate": (0.021, 0.04, 0.5, 1.0), "steps": (201, 400, 401, 5000), "noise_multiplier": (0.999, 0.7, 0.4)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WORSE.items() for value in values])
def test_epsilon_never_falls_where_less_is_hidden(name, value):
    assert epsilon(**BASE | {name: value}, delta=1e-5) > epsilon(**BASE, delta=1e-5)


def test_epsilon_never_falls_in_a_chain_of_small_changes():
    # The cells are narrower where noise is above 5.
    base = BASE | {"noise_multiplier": 6.0}
    for name, values in {
        "noise_multiplier": np.linspace(8.0, 4.0, 5).tolist(),
        "overflow": [0.0, *np.geomspace(1e-15, 1e-7, 5).tolist()],
        "steps": list(range(1, 30, 4)),
    }.items():
        found = [epsilon(**base | {name: value}, delta=1e-5) for value in values]
        assert found == sorted(found), name


def test_what_was_asked_before_is_known():
    run = {"rate": 0.0123, "steps": 777, "noise_multiplier": 0.9, "delta": 1e-5}
    first = epsilon(**run)
    began = time.process_time()
    assert epsilon(**run) == first
    assert time.process_time() - began < 0.01


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"rate": 0.0}, ValueError, "rate must be above 0 and at most 1, got 0.0"),
        ({"rate": 1.5}, ValueError, "rate must be above 0 and at most 1, got 1.5"),
        ({"rate": "0.1"}, TypeError, "rate must be a number"),
        ({"steps": -1}, ValueError, "steps must be a whole number"),
        ({"noise_multiplier": 0.0}, ValueError, "noise_multiplier must be positive and finite, got 0.0"),
        ({"noise_multiplier": math.nan}, ValueError, "noise_multiplier must be positive and finite, got nan"),
        ({"delta": 1.0}, ValueError, "delta must be at least 1e-10 and below 1, got 1.0"),
        ({"delta": 1e-11}, ValueError, "delta must be at least 1e-10 .* cannot tell smaller ones from 0"),
        ({"overflow": math.nan}, ValueError, "overflow must be a probability, got nan"),
        ({"overflow": -1e-9}, ValueError, "overflow must be a probability"),
    ],
)
def test_errors_say_what_was_expected(changed, error, message):
    with pytest.raises(error, match=message):
        epsilon(**{"rate": 0.1, "steps": 10, "noise_multiplier": 1.0, "delta": 1e-5} | changed)


def test_epsilon_asked_for_must_be_positive():
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="epsilon must be positive and finite"):
            noise_multiplier(0.1, 10, wrong, 1e-5)


def test_no_steps_cost_nothing():
    assert epsilon(0.1, 0, 1.0, 1e-5) == 0.0


def test_noise_of_few_integers_has_no_proof():
    assert multiplier_on_integers(2.0, 64) == pytest.approx(2.0 * math.sqrt(1 - 1 / 1024), rel=1e-14)
    assert multiplier_on_integers(2.0, 64) < 2.0 * math.sqrt(1 - 1 / 1024)
    with pytest.raises(ValueError, match=r"of 32 steps of the grid, and the proof needs 64\. Pass 2 times the grid"):
        multiplier_on_integers(0.5, 64)


def test_importing_gradclip_imports_no_accountant():
    code = (
        "import sys, gradclip; gradclip.PrivateRun; print([name in sys.modules for name in ('dp_accounting', 'scipy')])"
    )
    assert fresh_process.run(code, ".") == "[False, False]"


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    accounting.epsilon_at.cache_clear()
    accounting._accountant.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"needs dp-accounting, .* pip install '\.\[private\]'"):
        epsilon(0.1, 10, 1.0, 1e-5)


@pytest.mark.parametrize(
    ("rate", "steps", "epsilon", "delta"), [(0.01, 1000, 3.0, 1e-5), (0.1, 200, 8.0, 1e-6), (0.02, 10, 0.5, 1e-5)]
)
def test_fine_cells_are_asked_about_the_answer_and_its_neighbour_alone(rate, steps, epsilon, delta):
    asked, run = [], accounting._checked(rate, steps, delta, 0.0)

    def epsilon_of(multiplier, width):
        asked.append((multiplier, width))
        return run(multiplier, width)

    found = accounting.smallest_multiplier(epsilon_of, epsilon)
    below, answer = sorted({multiplier for multiplier, width in asked if width == accounting.FINEST})
    assert answer == found
    assert 0 < found - below < 1.001e-3 * found
    assert run(found) <= epsilon < run(below)


@pytest.mark.parametrize(
    ("epsilon_of", "target"),
    [
        (lambda m, width: 8 + (1 + 100 * width) / m**2, 8.01),  # most is spent before
        (lambda m, width: 50 + (1 + 100 * width) / m, 50.0000123),
        (lambda m, width: 5.0 if m < 1.2345 else 0.0, 1.0),
        (lambda m, width: math.inf if m < 3.1234 + width else 1e-3, 0.5),
        (lambda m, width: (9.0 if width > 1e-3 else 1.0) / m, 1.5),
        (lambda m, width: (1.0 if width > 3e-3 else 0.5 if width > 7e-4 else 3.0) / m, 1e-4),
        (lambda m, width: 2.0 if m < 7 else 2.0 - 1e-12 * m, 2.0 - 1e-11),
    ],
)
def test_the_answer_is_the_smallest_of_its_digits(epsilon_of, target):
    # Wide cells of these functions point far off, or say nothing.
    found = accounting.smallest_multiplier(epsilon_of, target)
    unit = 10.0 ** (math.floor(math.log10(found)) - 3)
    assert epsilon_of(found, accounting.FINEST) <= target < epsilon_of(found - unit, accounting.FINEST)
