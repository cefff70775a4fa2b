"""A plain recurrent network that reads a handwritten digit one pixel at a time.

The state is h_t = tanh(h_{t-1} W + x_t U + b), and the last state predicts the digit. The gradient passes through W
once for each of the 64 pixels, so it grows or shrinks like W^64. These are the exploding gradients of Pascanu, Mikolov
and Bengio, "On the difficulty of training recurrent neural networks" (2013), who proposed to clip the global norm.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

HIDDEN = 64
CLASSES = 10
TEST_SHARE = 0.2
SPLIT_SEED = 0


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

    They are drawn with NumPy: compiling this with JAX would take longer than a short training.
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
