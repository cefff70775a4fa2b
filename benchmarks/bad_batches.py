"""Train a small network on handwritten digits with bad batches, clipped by each of the rules.

Every fiftieth batch has inputs a hundred times too large and random labels. In a second training, one batch also holds
a NaN. The loop skips that step for every rule, as loops with a GradScaler do. The test is how the rule behaves after
seeing the NaN. The network is written in NumPy: 64 inputs, 32 rectified units, 10 classes, momentum.
"""

import math

import numpy as np
from sklearn.datasets import load_digits

STEPS, BATCH, HIDDEN, RATE, MOMENTUM = 600, 32, 32, 0.1, 0.9
EVERY, NAN_AT = 50, 300


class NoClipping:
    """A rule that leaves every norm unchanged."""

    name = "no clipping"
    limit = math.inf

    def after(self, norm):
        return norm


def digits(rng):
    """Return inputs and labels for training, and others for testing."""
    data = load_digits()
    order = rng.permutation(len(data.target))
    inputs, labels = data.data[order] / 16.0, data.target[order]
    return (inputs[:1200], labels[:1200]), (inputs[1200:], labels[1200:])


def network(rng):
    shapes = {"w": (64, HIDDEN), "b": (HIDDEN,), "v": (HIDDEN, 10), "c": (10,)}
    return {
        name: rng.standard_normal(shape) * (2 / shape[0]) ** 0.5 * (len(shape) > 1) for name, shape in shapes.items()
    }


def outputs(weights, inputs):
    hidden = np.maximum(inputs @ weights["w"] + weights["b"], 0.0)
    return hidden, hidden @ weights["v"] + weights["c"]


def gradients(weights, inputs, labels):
    hidden, scores = outputs(weights, inputs)
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    off = scores / scores.sum(axis=1, keepdims=True)
    off[np.arange(len(labels)), labels] -= 1.0
    off /= len(labels)
    back = (off @ weights["v"].T) * (hidden > 0)
    return {"w": inputs.T @ back, "b": back.sum(0), "v": hidden.T @ off, "c": off.sum(0)}


def accuracy(rule, seed, *, with_nan):
    """Train, and return the share of test digits that the network recognises."""
    rng = np.random.default_rng(seed)
    (inputs, labels), (unseen, wanted) = digits(rng)
    weights = network(rng)
    speed = {name: np.zeros_like(x) for name, x in weights.items()}
    for step in range(STEPS):
        chosen = rng.integers(0, len(labels), BATCH)
        given, told = inputs[chosen], labels[chosen]
        if step % EVERY == EVERY - 1:
            given, told = given * 100.0, rng.integers(0, 10, BATCH)
        if with_nan and step == NAN_AT:
            given = given * math.nan
        grads = gradients(weights, given, told)
        norm = math.sqrt(sum(float(np.sum(x * x)) for x in grads.values()))
        left = rule.after(norm)
        if left == 0.0 or not math.isfinite(norm):
            continue
        if left != norm:
            grads = {name: x * (left / norm) for name, x in grads.items()}
        for name, x in grads.items():
            speed[name] = MOMENTUM * speed[name] + x
            weights[name] -= RATE * speed[name]
    return float(np.mean(outputs(weights, unseen)[1].argmax(axis=1) == wanted))


def accuracies(rules, seeds):
    """Return, for each rule, the accuracies of both trainings, one per seed."""
    found = []
    with np.errstate(all="ignore"):
        for make in (*rules, NoClipping):
            both = {
                kind: [accuracy(make(), seed, with_nan=with_nan) for seed in range(seeds)]
                for kind, with_nan in (("bad batches", False), ("and a NaN", True))
            }
            found.append({"rule": make.name, **both})
    return found
