"""What a training task is, and what the tasks share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclass(frozen=True)
class Task:
    """A training: `batches(seed)` holds a batch for each step; `judge` returns the figure of the trained parameters.

    `optimizer` makes steps of unit rate. The rate at each step is `rate * schedule(share of the training done)`.
    """

    name: str
    figure: str  # what is measured on unseen data: accuracy, loss or error
    steps: int
    rates: tuple[float, ...]
    start: Callable[[int], Any]
    batches: Callable[[int], Any]
    loss: Callable[[Any, Any], jax.Array]
    judge: Callable[[Any], jax.Array]
    optimizer: optax.GradientTransformation
    together: int  # runs that are trained in one program
    schedule: Callable[[float], float] = lambda done: 0.5 + 0.5 * float(np.cos(np.pi * done))

    @property
    def higher_is_better(self):
        return self.figure == "accuracy"


def cross_entropy(scores, labels):
    return optax.softmax_cross_entropy_with_integer_labels(scores.astype(jnp.float32), labels).mean()


def right(scores, labels):
    return (jnp.isfinite(scores).all(-1) & (scores.argmax(-1) == labels)).mean()


def rates(low, high, per_decade=2):
    return tuple(float(f"{x:.2g}") for x in np.geomspace(low, high, round(np.log10(high / low) * per_decade) + 1))


def momentum():
    return optax.trace(0.9)
