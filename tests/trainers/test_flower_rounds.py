"""Adaptive thresholds, noise, weights and accounts of the strategies over rounds of training."""

import inspect
import random

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as theirs
from flwr.supercore.differential_privacy import KEY_NORM_BIT

import gradclip
from federation import InProcess, arrays_of, record
from gradclip.integrations import flower
from wrapped import (
    ADAPTIVE,
    FIXED,
    OLD,
    OURS,
    THEIRS,
    Accountant,
    average,
    every_wrapper,
    federation,
    mods,
    moved,
    wrapper,
)


@pytest.fixture(autouse=True)
def _seeded():
    """Flower samples clients with `random`, and draws noise with `np.random`."""
    random.seed(0)
    np.random.seed(0)


NORMS = np.linspace(1.0, 4.5, 8)


def quantile(name, first, target):
    settings = {"target_clipped_quantile": target, "threshold": first, "rounds": 40, "clients": len(NORMS)}

    def train(arrays, node):
        return {"w": (arrays["w"] + NORMS[node - 1]).astype(np.float32)}

    return federation(name, train, old={"w": np.zeros(1, np.float32)}, **settings)[1].clipping_norm


@pytest.mark.parametrize("name", ADAPTIVE)
@pytest.mark.parametrize("target", [0.25, 0.5, 0.75])
def test_the_threshold_comes_to_the_quantile_from_both_sides(name, target):
    """A share `target` of the norms is longer: between the norms at the place below and above."""
    place = round(len(NORMS) * (1 - target))
    for first in (0.7, 12.0):
        found = quantile(name, first, target)
        assert NORMS[place - 1] * 0.97 < found < NORMS[place] * 1.03


@pytest.mark.parametrize("name", ADAPTIVE)
def test_the_threshold_of_flower_runs_away(name):
    """From 0.1, below all norms, and from 5, above all: 0.1 * exp(-0.1 * 60) and 5 * exp(0.1 * 60)."""
    settings = {"clients": 2, "rounds": 60, "library": theirs, "table": THEIRS, "old": {"w": np.zeros(1, np.float32)}}
    for first, last in ((0.1, 0.00025), (5.0, 2017.0)):
        usual = federation(name, moved(2.0), threshold=first, **settings)[1].clipping_norm
        assert usual == pytest.approx(last, rel=0.01)
        ours = federation(name, moved(2.0), threshold=first, **(settings | {"library": flower, "table": OURS}))
        assert ours[1].clipping_norm == pytest.approx(2.0, rel=0.11)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_noise_is_for_the_threshold_that_clipped(name):
    """All updates are longer than 0.5, so the threshold grows by exp(0.2 * 0.5). The noise was drawn before."""
    settings = {"noise": 1.0, "clipped_count_stddev": 1e-9, "threshold": 0.5, "clients": 2}
    with pytest.raises(ValueError, match="clipped_count_stddev"):
        wrapper(name, **settings)
    found = []
    wrapped = wrapper(name, **(settings | {"clipped_count_stddev": 0.6}))
    draw, wrapped._noised = wrapped._noised, lambda key, mean, std: found.append(std) or draw(key, mean, std)
    wrapped.start(InProcess(moved(9.0), 2, mods(name)), record(OLD), num_rounds=1)
    assert found[0] == pytest.approx(wrapped.noise_multiplier * 0.5 / 2, rel=1e-9)
    assert wrapped.clipping_norm != 0.5


def test_where_no_client_says_whether_it_was_clipped_nothing_changes_and_the_log_says_what_to_do(caplog):
    wrapped = wrapper(ADAPTIVE[1])
    made = wrapped.start(InProcess(moved(1.0), 4), record(OLD), num_rounds=1)
    assert not made.arrays
    assert wrapped.clipping_norm == 1.0
    assert caplog.text.count(f"its '{KEY_NORM_BIT}' must be 0 or 1, got None. Have all clients use adaptive") == 4


@every_wrapper
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_clients_of_different_weights_are_warned_of_where_there_is_noise(name, noise, caplog):
    wrapped = wrapper(name, noise=noise, **({"clipped_count_stddev": 9.0} if name in ADAPTIVE else {}))
    grid = InProcess(moved(1.0), 4, mods(name))
    answers = grid.send_and_receive(wrapped.configure_train(1, record(OLD), ConfigRecord(), grid))
    answers[0].content["metrics"]["num-examples"] = 5
    wrapped.aggregate_train(1, answers)
    assert ("one counts 2.5 times the mean" in caplog.text) == bool(noise)


def round_of(name, weights, *, noise=2.0, clients=4):
    """Return what a round makes of clients that change nothing, one reply for each weight."""
    old = {"w": np.zeros(20_000, np.float32)}
    settings = {"clipped_count_stddev": 9.0} if name in ADAPTIVE else {}
    wrapped = wrapper(name, noise=noise, clients=clients, **settings)
    grid = InProcess(moved(0.0), clients, mods(name))
    answers = grid.send_and_receive(wrapped.configure_train(1, record(old), ConfigRecord(), grid))[: len(weights)]
    for answer, weight in zip(answers, weights, strict=True):
        answer.content["metrics"]["num-examples"] = weight
    return arrays_of(wrapped.aggregate_train(1, answers)[0])["w"]


@every_wrapper
@pytest.mark.parametrize("replies", [1, 2, 4])
def test_noise_is_for_the_clients_that_replied(name, replies):
    """One of m clients moves the mean by 1 / m, however many were asked."""
    assert round_of(name, [1] * replies).std() == pytest.approx(2.0 / replies, rel=0.02)


@pytest.mark.parametrize("name", FIXED)
def test_accounting_is_that_of_flower(name):
    found = []
    for library, table in ((flower, OURS), (theirs, THEIRS)):
        accountant = Accountant()
        settings = {"noise": 1.0, "accountant": accountant, "old": {"w": OLD["w"]}}
        _, wrapped, _ = federation(name, moved(1.0), rounds=3, library=library, table=table, **settings)
        found.append((accountant.events, wrapped.privacy_spent()))
    assert found[0] == found[1]
    assert len(found[0][0]) == 3
    assert found[0][0][0].noise_multiplier == 1.0


def test_a_federation_learns():
    """Four clients with different data fit y = 2 x0 - 3 x1, by updates of at most 0.5."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(4, 50, 2))
    labels = features @ [2.0, -3.0]

    def train(arrays, node):
        x, y, w = features[node - 1], labels[node - 1], arrays["w"].astype(np.float64)
        for _ in range(5):
            w = w - 0.1 * x.T @ (x @ w - y) / len(y)
        return {"w": w.astype(np.float32)}

    for name in FIXED + ADAPTIVE:
        inner = average(fraction_evaluate=1.0)
        made, _, grid = federation(
            name, train, rounds=30, threshold=0.5, inner=inner, old={"w": np.zeros(2, np.float32)}
        )
        np.testing.assert_allclose(made["w"], [2.0, -3.0], atol=0.01)
        assert grid.evaluated == 30 * 4  # messages for evaluation pass the mods


@pytest.mark.parametrize("kind", [theirs.FedAdam, theirs.FedMedian, theirs.FedAvgM])
def test_other_strategies_may_be_wrapped(kind):
    inner = kind(fraction_evaluate=0.0)
    made, _, _ = federation(FIXED[0], moved(3.0), inner=inner, rounds=2, old={"w": OLD["w"]})
    assert made["w"].dtype == np.float32
    assert np.isfinite(made["w"]).all()


def test_the_bound_holds_for_what_the_server_adds():
    rng = np.random.default_rng(1)
    old = {"w": rng.normal(size=(20, 3)).astype(np.float32)}

    def train(arrays, node):
        return {"w": (arrays["w"] + np.random.default_rng(node).normal(size=(20, 3))).astype(np.float32)}

    _, _, grid = federation(FIXED[0], train, clients=40, old=old)
    for reply in grid.replies:
        update = np.subtract(arrays_of(reply.content["arrays"])["w"], old["w"])
        assert update.dtype == np.float64
        assert gradclip.norm_at_most([update], 1.0)


def test_arguments_are_those_of_flower():
    for name in FIXED + ADAPTIVE:
        assert issubclass(getattr(flower, name), getattr(theirs, name))
        assert inspect.signature(getattr(flower, name)) == inspect.signature(getattr(theirs, name))
