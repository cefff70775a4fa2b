"""Flower's wrappers of strategies with gradclip's clipping, in whole federations with Flower's `Strategy.start`."""

import math
import random

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.clientapp import mod
from flwr.serverapp import strategy as theirs
from flwr.serverapp.exception import AggregationError
from flwr.supercore.differential_privacy import KEY_NORM_BIT
from flwr.supercore.privacy_accounting import NeighboringRelation, PrivacyConfig, PrivacySpent, SamplingMethod

import gradclip
from federation import InProcess, arrays_of, record
from gradclip.integrations import flower

SERVER, CLIENT = "DifferentialPrivacyServerSide", "DifferentialPrivacyClientSide"
FIXED = [f"{side}FixedClipping" for side in (SERVER, CLIENT)]
ADAPTIVE = [f"{side}AdaptiveClipping" for side in (SERVER, CLIENT)]
OURS = {CLIENT: {"Fixed": flower.fixedclipping_mod, "Adaptive": flower.adaptiveclipping_mod}, SERVER: {}}
THEIRS = {CLIENT: {"Fixed": mod.fixedclipping_mod, "Adaptive": mod.adaptiveclipping_mod}, SERVER: {}}
every_wrapper = pytest.mark.parametrize("name", FIXED + ADAPTIVE)
OLD = {"w": np.array([1.0, -2.0], np.float32), "b": np.array(0.5, np.float32), "n": np.array(10)}


@pytest.fixture(autouse=True)
def _seeded():
    """Flower samples clients with `random`, and draws noise with `np.random`."""
    random.seed(0)
    np.random.seed(0)


def average(**settings):
    return theirs.FedAvg(**({"fraction_evaluate": 0.0} | settings))


def wrapper(name, library=flower, *, clients=4, noise=0.0, threshold=1.0, inner=None, **settings):
    first = (threshold, clients) if "Fixed" in name else (clients, threshold)
    return getattr(library, name)(inner or average(), noise, *first, **settings)


def mods(name, table=OURS):
    side = SERVER if name.startswith(SERVER) else CLIENT
    found = table[side].get("Fixed" if "Fixed" in name else "Adaptive")
    return [found] if found else []


def federation(name, train, *, rounds=1, clients=4, table=OURS, library=flower, old=None, inner=None, **settings):
    """Return the parameters after some rounds, the wrapper and the grid."""
    wrapped = wrapper(name, library, clients=clients, inner=inner, **settings)
    grid = InProcess(train, clients, mods(name, table))
    made = wrapped.start(grid, record(old or OLD), num_rounds=rounds)
    return arrays_of(made.arrays), wrapped, grid


def moved(step):
    """Return a training that adds a step to the floating-point arrays and counts a batch."""

    def train(arrays, node):
        amount = step(node) if callable(step) else step
        return {k: (x + amount).astype(x.dtype) if x.dtype.kind == "f" else x + 1 for k, x in arrays.items()}

    return train


@every_wrapper
def test_rounds_give_what_flower_gives(name):
    old = {key: OLD[key].reshape(-1) for key in ("w", "b")}

    def train(arrays, node):
        rng = np.random.default_rng(node)
        return {key: (x + rng.normal(size=x.shape)).astype(x.dtype) for key, x in arrays.items()}

    settings = {"target_clipped_quantile": 1.0} if name in ADAPTIVE else {}
    ours, wrapped, _ = federation(name, train, rounds=1, old=old, **settings)
    usual, other, _ = federation(name, train, rounds=1, old=old, table=THEIRS, library=theirs, **settings)
    for key in old:
        assert ours[key].dtype == np.float32
        np.testing.assert_allclose(ours[key], usual[key], rtol=0.0, atol=5e-7)
    assert wrapped.noise_multiplier == other.noise_multiplier == 0.0


@every_wrapper
def test_counters_and_0d_parameters_keep_their_dtype_and_shape(name):
    made, _, _ = federation(name, moved(3.0), threshold=1.5, rounds=2)
    assert {key: (x.dtype, x.shape) for key, x in made.items()} == {k: (x.dtype, x.shape) for k, x in OLD.items()}
    assert made["n"] == 12
    first = 1.5 / math.sqrt(3)
    if name in FIXED:
        np.testing.assert_allclose(made["b"], 0.5 + 2 * first, rtol=1e-6)


@every_wrapper
def test_updates_of_zero_leave_the_parameters(name):
    made, wrapped, _ = federation(name, lambda arrays, node: arrays, rounds=3)
    assert all(made[key].tobytes() == OLD[key].tobytes() for key in OLD)
    assert wrapped.num_refused == 0


@every_wrapper
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_client_that_is_not_finite_adds_nothing(name, bad):
    made, wrapped, _ = federation(name, moved(lambda node: bad if node == 2 else 0.25))
    np.testing.assert_allclose(made["w"], OLD["w"] + 0.75 * 0.25, rtol=1e-6)
    assert wrapped.num_refused == (1 if name.startswith(SERVER) else 0)


@pytest.mark.parametrize("name", [FIXED[0], ADAPTIVE[0]])
@pytest.mark.parametrize(
    "sent",
    [
        {"w": np.array([10**6, 10**6]), "b": OLD["b"], "n": OLD["n"]},
        {"w": np.zeros(3, np.float32), "b": OLD["b"], "n": OLD["n"]},
        {"w": OLD["w"], "b": OLD["b"]},
        {"w": OLD["w"], "b": OLD["b"], "n": np.array(1e6)},
    ],
)
def test_a_client_that_sends_other_arrays_adds_nothing(name, sent, caplog):
    """Integers instead of weights would not be clipped."""
    made, wrapped, _ = federation(name, lambda arrays, node: sent if node == 3 else arrays)
    assert all(made[key].tobytes() == OLD[key].tobytes() for key in OLD)
    assert wrapped.num_refused == 1
    assert "the update of node 3 counts as zero: its arrays are not those that were sent" in caplog.text


@every_wrapper
def test_a_round_without_replies_changes_nothing(name):
    wrapped = wrapper(name)
    list(wrapped.configure_train(1, record(OLD), ConfigRecord(), InProcess(moved(1.0), 4)))
    assert wrapped.aggregate_train(1, iter(())) == (None, None)
    assert wrapped.clipping_norm == 1.0
    if name in ADAPTIVE:
        with pytest.raises(ZeroDivisionError):
            wrapper(name, theirs).aggregate_train(1, [])


@pytest.mark.parametrize("name", [FIXED[1], ADAPTIVE[1]])
def test_an_error_of_a_client_skips_the_round_as_in_flower(name):
    wrong = {"w": np.zeros((2, 2), np.float32), "b": OLD["b"], "n": OLD["n"]}
    grid = InProcess(lambda arrays, node: wrong if node == 1 else arrays, 4, mods(name))
    wrapped = wrapper(name)
    replies = grid.send_and_receive(wrapped.configure_train(1, record(OLD), ConfigRecord(), grid))
    assert sum(reply.has_error() for reply in replies) == 1
    assert wrapped.aggregate_train(1, replies) == (None, None)
    assert wrapped.clipping_norm == 1.0


@every_wrapper
def test_replies_may_come_from_an_iterator(name):
    wrapped, grid = wrapper(name), InProcess(moved(0.5), 4, mods(name))
    asked = wrapped.configure_train(1, record(OLD), ConfigRecord(), grid)
    arrays, _ = wrapped.aggregate_train(1, iter(grid.send_and_receive(asked)))
    np.testing.assert_allclose(arrays_of(arrays)["w"], OLD["w"] + 0.5, rtol=1e-6)


@every_wrapper
def test_noise_is_drawn_once_in_float64_and_covers_the_rounding_of_the_mean(name):
    settings = {"noise": 2.0} | ({"clipped_count_stddev": 1e6} if name in ADAPTIVE else {})
    np.random.seed(5)
    made, wrapped, _ = federation(name, lambda arrays, node: arrays, threshold=0.5, **settings)
    np.random.seed(5)
    least = 2.0 * 0.5 / 4
    std = wrapped.noise_multiplier / 2.0 * least
    for key in ("w", "b"):
        expected = OLD[key] + np.random.normal(0.0, std, OLD[key].shape)
        np.testing.assert_allclose(made[key], expected, rtol=2.0**-23)
    wrapped.clipping_norm = 0.5
    assert least < wrapped._std() < least * (1 + 1e-9)
    assert made["n"] == 10  # what no noise hides stays as the server sent it


def test_the_mean_is_rounded_once():
    """Three clients move 1 by 1/3, clipped: each float32 sum of them would be rounded, and so their mean."""
    old = {"w": np.full(200, 1000.0, np.float32)}
    steps = np.random.default_rng(0).normal(size=(3, 200))

    def train(arrays, node):
        return {"w": (arrays["w"] + steps[node - 1]).astype(np.float32)}

    made, _, _ = federation(FIXED[0], train, clients=3, threshold=1e9, old=old)
    trained = [train(old, node)["w"].astype(np.float64) for node in (1, 2, 3)]
    assert made["w"].tolist() == np.mean(trained, axis=0).astype(np.float32).tolist()
    usual, _, _ = federation(FIXED[0], train, clients=3, threshold=1e9, old=old, library=theirs)
    assert (usual["w"] != made["w"]).any()


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


@pytest.mark.after_error
def test_a_reply_that_does_not_say_whether_it_was_clipped_is_an_error():
    wrapped = wrapper(ADAPTIVE[1])
    with pytest.raises(AggregationError, match=f"no '{KEY_NORM_BIT}' in its MetricRecord.*adaptiveclipping_mod"):
        wrapped.start(InProcess(moved(1.0), 4), record(OLD), num_rounds=1)
    assert wrapped.clipping_norm == 1.0


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


@every_wrapper
@pytest.mark.parametrize("weights", [[math.nan, 1.0], [math.inf, 1.0], [-1, 3], [0, 0]])
def test_weights_that_make_no_mean_are_an_error(name, weights):
    with pytest.raises(AggregationError, match="the weights of clients, 'num-examples', must be finite, 0 or more"):
        round_of(name, weights)
    assert round_of(name, [0, 1]).size == 20_000


class Accountant:
    """Flower's protocol of an accountant. Its own needs a package more."""

    config = PrivacyConfig(
        target_delta=1e-5,
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        population_size=4,
        sampling_method=SamplingMethod.NO_AMPLIFICATION,
    )

    def __init__(self):
        self.events = []

    def compose(self, event):
        self.events.append(event)

    def get_privacy_spent(self):
        return PrivacySpent(
            epsilon=float(len(self.events)), delta=1e-5, num_releases=len(self.events), accounting_method="counted"
        )


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
        assert getattr(flower, name).__init__ is getattr(theirs, name).__init__
