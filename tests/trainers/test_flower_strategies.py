"""Flower's wrappers of strategies with gradclip's clipping, in whole federations with Flower's `Strategy.start`."""

import math
import random

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as theirs

from federation import InProcess, arrays_of, record
from wrapped import (
    ADAPTIVE,
    FIXED,
    OLD,
    SERVER,
    THEIRS,
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
