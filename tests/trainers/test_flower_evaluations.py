"""Hostile clients in an evaluation: none ends it, or makes of it what is no number, and the log names it."""

import random

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as theirs

from federation import InProcess, record
from hostile import BROKEN, HARMLESS, UNLIKE, WEIGHT, with_metric
from wrapped import FIXED, OLD, average, every_wrapper, mods, moved, wrapper

CLIENTS = 4
ALL = BROKEN | UNLIKE | HARMLESS


@pytest.fixture(autouse=True)
def _seeded():
    """Flower samples clients with `random`."""
    random.seed(0)
    np.random.seed(0)


class Evaluated(InProcess):
    """Clients of which one sends something else when it is asked to evaluate. Their losses are 1, 2, 3 ..."""

    def __init__(self, change, hostile, clients, name=FIXED[0]):
        super().__init__(moved(0.25), CLIENTS, mods(name))
        self.change, self.hostile, self.answering = change, hostile, clients

    def send_and_receive(self, messages, *, timeout=None):
        replies = sorted(super().send_and_receive(messages), key=lambda reply: reply.metadata.src_node_id)
        place = self.hostile - 1
        if replies and replies[0].metadata.message_type == "evaluate":
            replies[place] = self.change(replies[place]) or replies[place]
            return replies[: self.answering]
        return replies


def evaluated(name, change, *, hostile, clients=CLIENTS, library=None, **settings):
    """Return the metrics of an evaluation, and the wrapper."""
    wrapped = wrapper(name, *([library] if library else []), inner=average(fraction_evaluate=1.0), **settings)
    grid = Evaluated(change, hostile, clients, name)
    asked = wrapped.configure_evaluate(1, record(OLD), ConfigRecord(), grid)
    return wrapped.aggregate_evaluate(1, iter(grid.send_and_receive(asked))), wrapped


@every_wrapper
@pytest.mark.parametrize("what", BROKEN | UNLIKE)
@pytest.mark.parametrize("hostile", [1, 3])
def test_a_reply_that_makes_no_mean_is_left_out(name, what, hostile, caplog):
    metrics, wrapped = evaluated(name, ALL[what], hostile=hostile)
    assert metrics == {"loss": pytest.approx((10 - hostile) / 3)}
    assert wrapped.num_refused == (0 if what == "an error" else 1)
    assert f"aggregate_evaluate: the reply of node {hostile} is left out: " in caplog.text


@every_wrapper
@pytest.mark.parametrize("what", HARMLESS)
def test_a_reply_with_other_names_or_more_metrics_counts(name, what):
    metrics, wrapped = evaluated(name, ALL[what], hostile=1)
    assert metrics == {"loss": 2.5}
    assert wrapped.num_refused == 0


@pytest.mark.parametrize("what", ALL)
@pytest.mark.parametrize("hostile", [1, 2])
def test_of_two_replies_what_both_have_counts(what, hostile):
    metrics, _ = evaluated(FIXED[0], ALL[what], hostile=hostile, clients=2)
    assert metrics == ({} if what in UNLIKE else {"loss": 3 - hostile if what in BROKEN else 1.5})


@pytest.mark.parametrize("what", ALL)
def test_a_hostile_client_alone_ends_no_evaluation(what):
    metrics, _ = evaluated(FIXED[0], ALL[what], hostile=1, clients=1)
    assert (metrics is None) == (what in BROKEN)
    assert all(np.isfinite(x).all() for x in (metrics or {}).values())


@every_wrapper
def test_a_weight_counts_as_at_most_ten_times_the_median(name):
    metrics, _ = evaluated(name, with_metric(WEIGHT, 1e300), hostile=4)
    assert metrics["loss"] == pytest.approx((1 + 2 + 3 + 10 * 4) / 13)


@every_wrapper
def test_an_evaluation_that_nobody_answers_has_no_metrics(name):
    wrapped = wrapper(name)
    assert wrapped.aggregate_evaluate(1, iter(())) is None


@pytest.mark.parametrize("what", ["no metrics", "no loss", "a weight of NaN"])
def test_a_training_goes_on_where_that_of_flower_ends_or_has_no_number(what):
    results = wrapper(FIXED[0], inner=average(fraction_evaluate=1.0)).start(
        Evaluated(ALL[what], 1, CLIENTS), record(OLD), num_rounds=2
    )
    assert results.evaluate_metrics_clientapp == {1: {"loss": 3.0}, 2: {"loss": 3.0}}
    if what == "a weight of NaN":
        assert np.isnan(evaluated(FIXED[0], ALL[what], hostile=1, library=theirs)[0]["loss"])
    else:
        with pytest.raises(Exception, match="MetricRecord"):
            evaluated(FIXED[0], ALL[what], hostile=1, library=theirs)
