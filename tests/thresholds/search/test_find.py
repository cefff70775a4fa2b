"""Thresholds and rates that are tried, and what is refused."""

import math

import pytest

import gradclip
import long_chain
from gradclip._src.thresholds.search.find import GRID, find_max_norm


def test_the_best_threshold_of_a_training_that_needs_one():
    found = find_max_norm(long_chain.train, [0.01, 0.1, 1.0, 100.0], learning_rates=[0.03, 0.1], seeds=2)
    assert found.max_norm in (0.01, 0.1)
    by_setting = {(trial.max_norm, trial.learning_rate): trial.loss for trial in found.table}
    assert by_setting[100.0, 0.03] > 0.5 > 0.02 > by_setting[0.1, 0.03]


def test_each_run_is_made_once_in_order():
    calls = []

    def train(*arguments):
        calls.append(arguments)
        return 1.0

    find_max_norm(train, [3, 1.0, 3.0], learning_rates=(0.2, 0.1), seeds=[5, 4, 5])
    assert calls == [(c, rate, seed) for rate in (0.1, 0.2) for c in (1.0, 3.0) for seed in (5, 4)]
    calls.clear()
    found = find_max_norm(train, seeds=1)
    assert calls == [(c, 0) for c in GRID]
    assert (GRID[0], GRID[-2:], found.learning_rate) == (0.01, (100.0, math.inf), None)


def test_values_of_advice_are_candidates():
    monitor = gradclip.Monitor()
    long_chain.train(math.inf, 0.03, 0, monitor)
    values = monitor.advise().try_values
    found = find_max_norm(lambda max_norm, seed: long_chain.train(max_norm, 0.03, seed), values, seeds=2)
    assert found.max_norm in values


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"train": None}, TypeError, "train must be a function of a threshold and a seed, got None"),
        ({"candidates": [-1.0]}, ValueError, "candidates must be numbers of at least 0, got -1.0"),
        ({"candidates": [math.nan]}, ValueError, "candidates must be numbers of at least 0, got nan"),
        ({"candidates": ["x"]}, ValueError, "got 'x'"),
        ({"candidates": 1.0}, ValueError, "candidates must be a list of numbers of at least 0, got 1.0"),
        ({"candidates": "12"}, ValueError, "candidates must be a list of numbers of at least 0, got '12'"),
        ({"candidates": []}, ValueError, "got none. Leave it out"),
        ({"learning_rates": [0.0]}, ValueError, "learning_rates must be positive finite numbers, got 0.0"),
        ({"learning_rates": [math.inf]}, ValueError, "learning_rates must be positive finite numbers, got inf"),
        ({"seeds": 0}, ValueError, "seeds must be a number of at least 1"),
        ({"seeds": [0.5]}, ValueError, "got \\[0.5\\]"),
        ({"seeds": True}, ValueError, "got True"),
        ({"workers": 0}, ValueError, "workers must be a whole number of at least 1, got 0"),
        ({"workers": 1.5}, ValueError, "got 1.5"),
    ],
)
def test_what_cannot_be_used_is_refused_before_any_training(settings, error, words):
    calls = []
    train = settings.pop("train", lambda *_: calls.append(1) or 1.0)
    with pytest.raises(error, match=words):
        find_max_norm(train, **settings)
    assert calls == []
