"""A plain recurrent network that reads a handwritten digit one pixel at a time, and its training.

The state is h_t = tanh(h_{t-1} W + x_t U + b), and the last state predicts the digit. The gradient passes through W
once for each of the 64 pixels, so it grows or shrinks like W^64. These are the exploding gradients of Pascanu, Mikolov
and Bengio, "On the difficulty of training recurrent neural networks" (2013), who proposed to clip the global norm.

One program trains all seeds together. All kinds of clipping run the same code.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from demo_results import Clipping
from gradclip import layer_norms
from gradclip.integrations.optax import adaptive_clip_by_global_norm, clip_by_global_norm_with_state

HIDDEN = 64
CLASSES = 10
TEST_SHARE = 0.2
SPLIT_SEED = 0
BATCH = 16
MOMENTUM = 0.9


class Digits(NamedTuple):
    """Images as (images, 64) float32 between 0 and 1, and the digits they show."""

    train_pixels: jax.Array
    train_digits: jax.Array
    test_pixels: jax.Array
    test_digits: jax.Array


class Parameters(NamedTuple):
    """The weights of the network."""

    recurrent: jax.Array
    input: jax.Array
    bias: jax.Array
    output: jax.Array
    output_bias: jax.Array


def load() -> Digits:
    """Load the 8x8 digits that ship with scikit-learn. The split is the same for all seeds."""
    pixels, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(digits))
    pixels = (pixels[order] / 16).astype(np.float32)
    digits = digits[order].astype(np.int32)
    test = round(len(digits) * TEST_SHARE)
    return Digits(
        train_pixels=jnp.asarray(pixels[test:]),
        train_digits=jnp.asarray(digits[test:]),
        test_pixels=jnp.asarray(pixels[:test]),
        test_digits=jnp.asarray(digits[:test]),
    )


def init(seed: int) -> Parameters:
    """Draw the weights. W is orthogonal, so it neither grows nor shrinks what passes through it.

    They are drawn with NumPy: compiling this with JAX would take longer than the shortest demo.
    """
    random = np.random.default_rng(seed)
    weights = Parameters(
        recurrent=np.linalg.qr(random.normal(size=(HIDDEN, HIDDEN))).Q,
        input=random.normal(size=HIDDEN),
        bias=np.zeros(HIDDEN),
        output=random.normal(size=(HIDDEN, CLASSES)) / (2 * HIDDEN**0.5),
        output_bias=np.zeros(CLASSES),
    )
    return Parameters(*(jnp.asarray(weight, jnp.float32) for weight in weights))


def logits(parameters: Parameters, pixels: jax.Array) -> jax.Array:
    """Read images (batch, 64) one pixel at a time and score the ten digits: (batch, 10)."""

    def read(state: jax.Array, pixel: jax.Array) -> tuple[jax.Array, None]:
        seen = pixel[:, None] * parameters.input + parameters.bias
        return jnp.tanh(state @ parameters.recurrent + seen), None

    start = jnp.zeros((pixels.shape[0], HIDDEN), pixels.dtype)
    state, _ = jax.lax.scan(read, start, pixels.T)
    return state @ parameters.output + parameters.output_bias


def loss(parameters: Parameters, pixels: jax.Array, digits: jax.Array) -> jax.Array:
    """Return the mean cross entropy in nats; guessing gives ln 10 = 2.30."""
    scores = logits(parameters, pixels)
    return optax.softmax_cross_entropy_with_integer_labels(scores, digits).mean()


def accuracy(parameters: Parameters, pixels: jax.Array, digits: jax.Array) -> jax.Array:
    """Return the share of images read correctly; non-finite scores count as wrong."""
    scores = logits(parameters, pixels)
    return (jnp.isfinite(scores).all(-1) & (scores.argmax(-1) == digits)).mean()


class Curves(NamedTuple):
    """Losses, norms before clipping, thresholds and norms of layers as (seeds, steps), test accuracy as (seeds,)."""

    losses: np.ndarray
    norms: np.ndarray
    max_norms: np.ndarray
    layers: Parameters
    test_accuracy: np.ndarray


def trainer(settings, clipping: Clipping) -> Callable[[float], Curves]:
    """Compile the training of all seeds, and return the function that runs it at a learning rate.

    All kinds of clipping and all rates see the same batches.
    """
    digits, seeds = load(), range(settings.seeds)
    weights = jax.tree.map(lambda *drawn: jnp.stack(drawn), *map(init, seeds))
    shape = (settings.steps, BATCH)
    rows = jnp.stack([np.random.default_rng(seed).integers(0, len(digits.train_digits), shape) for seed in seeds])
    optimizer = optax.chain(_clip(settings, clipping), optax.trace(MOMENTUM))

    def train(rate: jax.Array, weights: Parameters, rows: jax.Array) -> tuple[Any, ...]:
        rates = rate * optax.cosine_decay_schedule(1.0, settings.steps)(jnp.arange(settings.steps))
        step = partial(_step, digits, optimizer)
        (weights, _), measured = jax.lax.scan(step, (weights, optimizer.init(weights)), (rows, rates))
        return *measured, accuracy(weights, digits.test_pixels, digits.test_digits)

    program = jax.jit(jax.vmap(train, in_axes=(None, 0, 0))).lower(jnp.float32(0), weights, rows).compile()
    return lambda rate: Curves(*jax.tree.map(np.asarray, program(jnp.float32(rate), weights, rows)))


def _clip(settings, clipping: Clipping) -> optax.GradientTransformation:
    if clipping == "adaptive":
        return adaptive_clip_by_global_norm()
    return clip_by_global_norm_with_state(settings.max_norm if clipping == "fixed" else math.inf)


def _step(digits: Digits, optimizer: optax.GradientTransformation, state: Any, at: Any) -> tuple[Any, Any]:
    (weights, moments), (rows, rate) = state, at
    batch = digits.train_pixels[rows], digits.train_digits[rows]
    mean_loss, gradient = jax.value_and_grad(loss)(weights, *batch)
    updates, moments = optimizer.update(gradient, moments)
    weights = jax.tree.map(lambda weight, update: weight - rate * update, weights, updates)
    clip = moments[0]
    return (weights, moments), (mean_loss, clip.norm, clip.max_norm, layer_norms(gradient))
