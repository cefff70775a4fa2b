"""Small real trainings that need clipping. Each task says how a run starts, what it sees and how it is judged.

All runs of a task with the same seed see the same batches. Losses take the parameters and one batch.
"""

from dataclasses import replace
from functools import cache, partial

import digits_network as network
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from training_task import Task, cross_entropy, momentum, rates, right
from training_texts import bfloat16, experts, million

# A recurrent network that reads digits pixel by pixel


def recurrent():
    digits = network.load()

    def batches(seed):
        rows = np.random.default_rng(seed).integers(0, len(digits.train_digits), (600, 16))
        return np.asarray(digits.train_pixels)[rows], np.asarray(digits.train_digits)[rows]

    return Task(
        "recurrent network",
        "accuracy",
        600,
        rates(0.003, 1.0, 3),
        network.init,
        batches,
        lambda weights, batch: network.loss(weights, *batch),
        lambda weights: network.accuracy(weights, digits.test_pixels, digits.test_digits),
        momentum(),
        45,
    )


# Q-learning with rewards of infinite variance, on a random decision process whose solution is known

STATES, ACTIONS, DISCOUNT = 50, 4, 0.9


@cache
def process():
    """Return the process (Garnet, Archibald et al. 1995): next states, their chances, mean rewards, and the exact Q."""
    rng = np.random.default_rng(0)
    nexts = rng.integers(0, STATES, (STATES, ACTIONS, 3))
    chances = rng.dirichlet(np.ones(3), (STATES, ACTIONS))
    rewards = rng.normal(size=(STATES, ACTIONS))
    values = np.zeros((STATES, ACTIONS))
    for _ in range(1000):
        values = rewards + DISCOUNT * (chances * values.max(-1)[nexts]).sum(-1)
    return nexts, chances, rewards, values


def q_start(seed):
    rng = np.random.default_rng(seed)
    shapes = ((STATES, 64), (64, 64), (64, ACTIONS))
    return [jnp.asarray(rng.normal(size=shape) / max(1, shape[0] / 50) ** 0.5, jnp.float32) for shape in shapes]


def q_values(weights, states):
    first, second, last = weights
    return jax.nn.relu(jax.nn.relu(first[states]) @ second / 8) @ last / 8


def q_loss(weights, batch):
    state, action, reward, following = batch
    wanted = reward + DISCOUNT * jax.lax.stop_gradient(q_values(weights, following).max(-1))
    return jnp.square(jnp.take_along_axis(q_values(weights, state), action[..., None], -1)[..., 0] - wanted).mean()


def q_batches(seed):
    nexts, chances, rewards, _ = process()
    rng, shape = np.random.default_rng(seed), (1500, 64)
    state, action = rng.integers(0, STATES, shape), rng.integers(0, ACTIONS, shape)
    which = (rng.random((*shape, 1)) > chances[state, action].cumsum(-1)[..., :-1]).sum(-1)
    reward = rewards[state, action] + 0.5 * rng.standard_t(1.5, shape)
    return state, action, reward.astype(np.float32), nexts[state, action, which]


def q_error(weights):
    """Return the root mean square error of Q, divided by the spread of the exact Q."""
    exact = jnp.asarray(process()[3], jnp.float32)
    return jnp.sqrt(jnp.mean(jnp.square(q_values(weights, jnp.arange(STATES)) - exact))) / exact.std()


def heavy_tails():
    return Task(
        "Q-learning, heavy tails",
        "error",
        1500,
        rates(0.03, 10.0, 3),
        q_start,
        q_batches,
        q_loss,
        q_error,
        momentum(),
        45,
    )


# A network that sees a bad batch every fifty steps


def bad_batches():
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    pixels, labels = (data.data[order] / 16).astype(np.float32), data.target[order].astype(np.int32)

    def start(seed):
        rng = np.random.default_rng(seed)
        drawn = [rng.normal(size=shape) * (2 / shape[0]) ** 0.5 for shape in ((64, 32), (32, 10))]
        return {
            "w": jnp.asarray(drawn[0], jnp.float32),
            "b": jnp.zeros(32),
            "v": jnp.asarray(drawn[1], jnp.float32),
            "c": jnp.zeros(10),
        }

    def scores(weights, given):
        return jax.nn.relu(given @ weights["w"] + weights["b"]) @ weights["v"] + weights["c"]

    def batches(seed):
        rng = np.random.default_rng(seed)
        rows = rng.integers(0, 1200, (600, 32))
        given, told = pixels[rows], labels[rows]
        given[49::50] *= 100.0
        told[49::50] = rng.integers(0, 10, told[49::50].shape)
        return given, told

    return Task(
        "bad batches",
        "accuracy",
        600,
        rates(0.01, 10.0, 3),
        start,
        batches,
        lambda weights, batch: cross_entropy(scores(weights, batch[0]), batch[1]),
        lambda weights: right(scores(weights, jnp.asarray(pixels[1200:])), jnp.asarray(labels[1200:])),
        momentum(),
        70,
    )


@cache
def task(make, shorter):
    """Return a task, or a shorter form of it: a third of the steps and every other rate."""
    whole = make()
    return replace(whole, steps=whole.steps // 3, rates=whole.rates[::2]) if shorter else whole


TASKS = {
    "recurrent": partial(task, recurrent),
    "transformer": partial(task, million),
    "bfloat16": partial(task, bfloat16),
    "experts": partial(task, experts),
    "agent": partial(task, heavy_tails),
    "batches": partial(task, bad_batches),
}
