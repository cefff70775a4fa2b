"""Federations with hostile clients: no round ends, honest clients count, and no update is longer than the threshold.

Needs Flower, so it runs in the environment of the trainers.
"""

import contextlib
import logging
import math
import random
from fractions import Fraction
from statistics import median_low
from typing import NamedTuple
from unittest import mock

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as theirs
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from attack import replies
from federation import InProcess, arrays_of, record
from wrapped import ADAPTIVE, FIXED, SERVER, Accountant, mods, wrapper

WEIGHT = "num-examples"
NOISE = 1e-9
"""The noise of accounted rounds, which must have some: far below what is tolerated."""


class Case(NamedTuple):
    """A strategy, what the server sends first, what honest clients add in each round, and which clients are hostile."""

    name: str
    threshold: float
    accounted: bool
    old: dict
    steps: list
    weights: list
    hostile: set


def draw(rng):
    name = str(rng.choice(FIXED + ADAPTIVE))
    clients, rounds = int(rng.integers(1, 8)), int(rng.integers(1, 3))
    dtype = str(rng.choice(["float16", "float32", "float32", "float64"]))
    size, most = 10.0 ** rng.uniform(-2, 2), 3.0 if dtype == "float16" else 6.0
    old = {key: np.asarray(size * rng.standard_normal(shape)).astype(dtype) for key, shape in replies.SHAPES.items()}
    sizes = 10.0 ** rng.uniform(-3, most, (rounds, clients))
    steps = [
        [{key: x * rng.standard_normal(old[key].shape) for key in old if key != "n"} for x in row] for row in sizes
    ]
    kinds = [[1] * clients, rng.integers(1, 100, clients).tolist(), (10.0 ** rng.uniform(-5, 5, clients)).tolist()]
    hostile = {n for n in range(1, clients + 1) if rng.random() < rng.choice([0.2, 0.5, 0.9])}
    accounted = name in FIXED and bool(rng.integers(2))
    weights = kinds[int(rng.integers(3))]
    old["n"] = np.array(10)
    return Case(name, 10.0 ** rng.uniform(-2, 2), accounted, old, steps, weights, hostile)


class Federation(InProcess):
    """Clients as a case says. All messages come back in a random order, and some hostile ones do not."""

    def __init__(self, case, rng):
        super().__init__(self._moved, len(case.weights), mods(case.name))
        self.case, self.rng, self.round = case, rng, 0

    def _moved(self, arrays, node):
        step = self.case.steps[self.round][node - 1]
        return {key: (x + step[key]).astype(x.dtype) if key in step else x + 1 for key, x in arrays.items()}

    def send_and_receive(self, messages, *, timeout=None):
        found = super().send_and_receive(messages)
        for place, reply in enumerate(found):
            node = reply.metadata.src_node_id
            reply.content["metrics"][WEIGHT] = self.case.weights[node - 1]
            if node in self.case.hostile:
                found[place] = replies.change(self.rng)(reply)
        kept = [one for one in found if one.metadata.src_node_id not in self.case.hostile or self.rng.integers(5)]
        return [kept[place] for place in self.rng.permutation(len(kept))]


class Told(logging.Handler):
    """Make the words of each message, so that one that cannot be made is an error, and show none."""

    def emit(self, record):
        record.getMessage()


@contextlib.contextmanager
def quiet():
    with mock.patch.multiple(logging.getLogger("flwr"), handlers=[Told()], propagate=False):
        yield


def attack(rng):
    """Train and evaluate some rounds, and check each against exact arithmetic."""
    case = draw(rng)
    random.seed(int(rng.integers(1 << 32)))  # by which Flower draws clients
    np.random.seed(int(rng.integers(1 << 32)))  # by which Flower draws noise
    seen = []

    def watched(contents, key):
        seen[:] = contents
        return aggregate_metricrecords(contents, key)

    least = dict.fromkeys(("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), 1)
    inner = theirs.FedAvg(train_metrics_aggr_fn=watched, evaluate_metrics_aggr_fn=watched, **least)
    extra = {"noise": NOISE, "accountant": Accountant()} if case.accounted else {}
    with quiet():
        wrapped = wrapper(case.name, clients=len(case.weights), threshold=case.threshold, inner=inner, **extra)
        grid, sent = Federation(case, rng), case.old
        for number in range(len(case.steps)):
            grid.round = number
            sent = trained(case, wrapped, grid, sent, seen)
            evaluated(case, wrapped, grid, sent, seen)


def trained(case, wrapped, grid, sent, seen):
    """Check a round of training; return the new parameters."""
    threshold = wrapped.clipping_norm
    found = grid.send_and_receive(wrapped.configure_train(1, record(sent), ConfigRecord(), grid))
    honest = honest_of(case, found)
    seen.clear()
    arrays, metrics = wrapped.aggregate_train(1, found)
    assert 0 < wrapped.clipping_norm < math.inf, case
    check_who_counts(case, honest, len(found), seen)
    if not seen:
        assert (arrays, metrics) == (None, None), case
        return sent
    made = arrays_of(arrays)
    told = {key: (x.dtype, x.shape) for key, x in made.items()}
    assert told == {key: (x.dtype, x.shape) for key, x in sent.items()}, (told, case)
    assert all(np.isfinite(x).all() for x in made.values()), (made, case)
    assert all(np.isfinite(x).all() for x in metrics.values()), (metrics, case)
    given = {id(content): arrays_of(next(iter(content.array_records.values()))) for content in seen}
    for content in seen:
        check_update(case, given[id(content)], sent, threshold, step_of(case, grid, honest, content))
    check_mean(case, made, given, sent, seen)
    if 2 * len(honest) > len(found):
        assert made["n"] == (sent["n"] if case.accounted else sent["n"] + 1), (made["n"], case)
    return made


def evaluated(case, wrapped, grid, sent, seen):
    """Check an evaluation: its mean is that of the losses that clients tell."""
    found = grid.send_and_receive(wrapped.configure_evaluate(1, record(sent), ConfigRecord(), grid))
    honest = honest_of(case, found)
    seen.clear()
    metrics = wrapped.aggregate_evaluate(1, found)
    check_who_counts(case, honest, len(found), seen, alike=False)
    assert (metrics is None) == (not seen), case
    assert all(np.isfinite(x).all() for x in (metrics or {}).values()), (metrics, case)
    if 2 * len(honest) > len(found):
        told = [(Fraction(one[WEIGHT]), Fraction(one["loss"])) for one in map(metrics_of, seen)]
        mean = sum(weight * loss for weight, loss in told) / sum(weight for weight, _ in told)
        slack = Fraction(1e-14) * max(abs(loss) for _, loss in told)
        assert abs(Fraction(metrics["loss"]) - mean) <= slack, (metrics, mean, case)


def honest_of(case, found):
    """Return the nodes of honest replies by their content, which is looked for in what is averaged."""
    nodes = {reply.metadata.src_node_id: reply for reply in found}
    return {id(reply.content): node for node, reply in nodes.items() if node not in case.hostile}


def metrics_of(content):
    (metrics,) = content.metric_records.values()
    return metrics


def step_of(case, grid, honest, content):
    """Return what an honest client added; None for a hostile one."""
    node = honest.get(id(content))
    return None if node is None else case.steps[grid.round][node - 1]


def check_who_counts(case, honest, asked, seen, *, alike=True):
    """Honest clients count, if no others are more, by their weights; nobody by more than 10 times the median."""
    weights = [Fraction(metrics_of(content)[WEIGHT]) for content in seen]
    most = Fraction(10 * float(median_low(weights or [0])))
    if case.accounted and alike:
        assert len(set(weights)) <= 1, (weights, case)
    assert max(weights, default=0) <= most, (weights, case)
    if 2 * len(honest) >= asked:
        assert set(honest) <= set(map(id, seen)), (honest, case)
    for content, weight in zip(seen, weights, strict=True):
        if id(content) in honest and not (case.accounted and alike):
            own = Fraction(case.weights[honest[id(content)] - 1])
            assert weight == min(own, most), (weight, own, case)


def check_update(case, given, sent, threshold, step):
    """What is averaged is at most the threshold from what was sent; an honest update is what it was, or clipped."""
    moved = {key: fractions(given[key]) - fractions(sent[key]) for key in sent if key != "n"}
    if case.name.startswith(SERVER) or step is not None:
        assert sum((x**2).sum() for x in moved.values()) <= Fraction(threshold) ** 2, (given, case)
    if step is None:
        return
    new = {key: np.asarray(sent[key] + x).astype(sent[key].dtype) for key, x in step.items()}
    update = {key: fractions(x) - fractions(sent[key]) for key, x in new.items()}
    squares = sum((x**2).sum() for x in update.values())
    clipped = squares > Fraction(threshold) ** 2
    share = Fraction(threshold / math.sqrt(squares)) if clipped else Fraction(1)
    for key, x in update.items():
        expected = (fractions(sent[key]) + share * x).astype(np.float64)
        slack = threshold * (0.01 if sent[key].itemsize == 2 else 1e-5) + 2 * step_at(new[key], sent[key])
        assert (np.abs(flat(given[key]) - expected) <= clipped * slack).all(), (key, given[key], expected, case)


def check_mean(case, made, given, sent, seen):
    """The new parameters are the weighted mean of what clients sent, rounded once."""
    weights = [Fraction(metrics_of(content)[WEIGHT]) for content in seen]
    longest = case.threshold + sum(np.abs(flat(x)).sum() for x in sent.values())
    noise = 20 * NOISE * longest * case.accounted
    for key in (key for key in sent if key != "n"):
        terms = [fractions(given[id(content)][key]) for content in seen]
        mean = (sum(w * x for w, x in zip(weights, terms, strict=True)) / sum(weights)).astype(np.float64)
        largest = max(np.abs(given[id(content)][key]).max(initial=0) for content in seen)
        slack = step_at(made[key]) + 1e-14 * largest + noise
        assert (np.abs(flat(made[key]) - mean) <= slack).all(), (key, made[key], mean, case)


def step_at(*arrays):
    """Return the distance from one number to the next, at the largest of some arrays."""
    return float(max(np.spacing(np.abs(x).max(initial=0)) for x in arrays))


def fractions(array):
    return np.array([Fraction(x) for x in np.asarray(array, np.float64).reshape(-1).tolist()], object)


def flat(array):
    return np.asarray(array, np.float64).reshape(-1)
