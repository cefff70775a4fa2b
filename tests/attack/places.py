"""Losses of several predictions, each at a kink, with one example less and the others where the promise allows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
import torch

import gradclip
from attack import private, shapes

FRAMEWORKS: dict[str, Any] = {
    "torch": (torch.as_tensor, torch.matmul, lambda x: torch.sum(torch.abs(x))),
    "jax": (jnp.asarray, jnp.matmul, lambda x: jnp.abs(x).sum()),
    "tensorflow": (tf.constant, tf.matmul, lambda x: tf.reduce_sum(tf.abs(x))),
}
WAYS = ({"pad_to": 1}, {"microbatch_size": 8}, {"microbatch_size": 3}, {"microbatch_size": 1}, {"method": "loop"})


class Case(NamedTuple):
    """How gradients are summed, and which examples are left, in which order."""

    framework: str
    settings: dict
    count: int
    features: int
    outputs: int
    left: str
    keyed: bool

    def __str__(self):
        return ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())


def attack(rng):
    """Leave one example out of a batch, and measure how far the sum moves."""
    measure(draw(rng), rng)


def draw(rng):
    framework = str(rng.choice(["torch", "torch", "torch", "jax", "tensorflow"]))
    count = int(rng.integers(2, 42 if framework == "torch" else 10))
    settings = dict(WAYS[int(rng.integers(len(WAYS)))])
    settings |= {"pad_to": count} if "pad_to" in settings else {}
    sizes = int(rng.choice([1, 3, 13, 33, 257])), int(rng.choice([1, 3, 10, 17]))
    keyed = framework == "jax" and bool(rng.integers(2))
    return Case(framework, settings, count, *sizes, str(rng.choice(["gap", "shifted", "shuffled"])), keyed)


def measure(case, rng):
    array, matmul, norm = FRAMEWORKS[case.framework]
    w = rng.normal(size=(case.features, case.outputs)).astype("f")
    x = (rng.uniform(1, 2, (case.count, 1)) * rng.normal(size=case.features)).astype("f")

    def loss(w, x, y, key=None):
        factor = 1.0 if key is None else jax.random.uniform(key, minval=1.0, maxval=2.0)
        predicted = matmul(x, w)
        return norm((predicted - y) * factor), predicted

    settings = case.settings | ({"prng_argnum": 3} if case.keyed else {})
    clipped = gradclip.clipped_grad(loss, 0.01, batch_argnums=(1, 2), has_aux=True, **settings)
    promise = clipped.sensitivity(batch_size=case.count, layout=gradclip.SumLayout(elements=w.size))
    index = int(rng.integers(case.count))
    order, mask = neighbour(case, index, promise.keeps_places, rng)
    rest = (jax.random.key(7),) if case.keyed else ()

    def called(order, y, mask):
        summed, outputs = clipped(array(w), array(x[order]), array(y[order]), *rest, mask=mask)
        return [shapes.numbers(summed)], np.asarray(outputs.aux)

    y = np.zeros((case.count, case.outputs), "f")
    everyone = np.arange(case.count)
    here, there = called(everyone, y, None)[1], y.copy()
    there[order] = called(order, y, mask)[1]
    y = np.where(here < there, here / 2 + there / 2, np.where(here > there, there, 2 * np.abs(here).max())).astype("f")
    sums = called(everyone, y, None)[0], called(order, y, mask)[0]
    private.check_distance(*sums, promise.total, f"clipped_grad: {case}")


def neighbour(case, index, keeps_places, rng):
    """Return which examples are left, in their order, and the mask."""
    if keeps_places or case.left == "gap":
        return np.arange(case.count), np.arange(case.count) != index
    order = np.delete(np.arange(case.count), index)
    return rng.permutation(order) if case.left == "shuffled" else order, None
