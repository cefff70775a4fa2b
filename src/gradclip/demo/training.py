"""A plain recurrent network that reads a handwritten digit one pixel at a time, and its training.

The state is h_t = tanh(h_{t-1} W + x_t U + b), and the last state predicts the digit. The gradient passes through W
once for each of the 64 pixels, so it grows or shrinks like W^64. These are the exploding gradients of Pascanu, Mikolov
and Bengio, "On the difficulty of training recurrent neural networks" (2013), who proposed to clip the global norm.

One run trains all seeds in parallel. All kinds of clipping run the same code.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from gradclip import global_norm, layer_norms
from gradclip.demo.results import Curves
from gradclip.demo.settings import DemoSettings
from gradclip.integrations.optax import AdaptiveClipState, adaptive_clip_by_global_norm, clip_by_global_norm
from gradclip.monitor.monitor import Monitor

HIDDEN = 64
CLASSES = 10
TEST_SHARE = 0.2
SPLIT_SEED = 0
BATCH = 32
MOMENTUM = 0.9
CHUNK = 100

Clipping = Literal["none", "fixed", "adaptive"]


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


# loss, norm, threshold, norms of layers
_Measured = tuple[jax.Array, jax.Array, jax.Array, Parameters]


class _State(NamedTuple):
    parameters: Parameters
    optimizer: Any
    key: jax.Array


def train(
    settings: DemoSettings,
    clipping: Clipping,
    on_chunk: Callable[[int, np.ndarray], None],
    monitor: Monitor | None = None,
) -> Curves:
    """Train every seed. After each chunk of steps, call `on_chunk(steps, losses)` to show progress.

    The monitor records the steps of the first seed.
    """
    digits = load()
    optimizer = _optimizer(settings, clipping)
    state = _start(settings.seeds, optimizer)
    run_chunk = _chunk_runner(digits, optimizer, partial(_threshold, settings, clipping))
    of_chunks: list[tuple[np.ndarray, ...]] = []
    for done in range(0, settings.steps, CHUNK):
        length = min(CHUNK, settings.steps - done)
        state, (*measured, layers) = run_chunk(state, length)
        of_chunks.append(tuple(map(np.asarray, measured)))
        losses, norms, max_norms = of_chunks[-1]
        if monitor is not None:
            of_layers = jax.tree.map(lambda of_seeds: of_seeds[0], layers)
            monitor.record(norms[0], max_norms[0], of_layers._asdict())
        on_chunk(length, losses)
    test = jax.vmap(accuracy, in_axes=(0, None, None))
    correct = jax.jit(test)(state.parameters, digits.test_pixels, digits.test_digits)
    losses, norms, max_norms = (np.concatenate(parts, 1) for parts in zip(*of_chunks, strict=True))
    return Curves(losses, norms, max_norms, np.asarray(correct))


def _optimizer(settings: DemoSettings, clipping: Clipping) -> optax.GradientTransformation:
    schedule = optax.cosine_decay_schedule(settings.learning_rate, settings.steps)
    sgd = optax.sgd(schedule, momentum=MOMENTUM)
    clip = clip_by_global_norm(settings.max_norm) if clipping == "fixed" else adaptive_clip_by_global_norm()
    return sgd if clipping == "none" else optax.chain(clip, sgd)


def _start(seeds: int, optimizer: optax.GradientTransformation) -> _State:
    drawn = [init(seed) for seed in range(seeds)]
    parameters = jax.tree.map(lambda *weights: jnp.stack(weights), *drawn)
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    return _State(parameters, jax.vmap(optimizer.init)(parameters), keys)


def _chunk_runner(
    digits: Digits, optimizer: optax.GradientTransformation, threshold: Callable[[Any], jax.Array]
) -> Callable[[_State, int], tuple[_State, _Measured]]:
    def step(state: _State, _: None) -> tuple[_State, _Measured]:
        key, draw = jax.random.split(state.key)
        rows = jax.random.randint(draw, (BATCH,), 0, len(digits.train_digits))
        batch = digits.train_pixels[rows], digits.train_digits[rows]
        mean_loss, gradient = jax.value_and_grad(loss)(state.parameters, *batch)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer)
        parameters = optax.apply_updates(state.parameters, updates)
        measured = mean_loss, global_norm(gradient), threshold(optimizer_state), layer_norms(gradient)
        return _State(parameters, optimizer_state, key), measured

    def run_chunk(states: _State, length: int) -> tuple[_State, _Measured]:
        return jax.vmap(lambda state: jax.lax.scan(step, state, length=length))(states)

    return jax.jit(run_chunk, static_argnums=1)


def _threshold(settings: DemoSettings, clipping: Clipping, optimizer_state: Any) -> jax.Array:
    """Return the threshold of the last step."""
    if clipping != "adaptive":
        return jnp.float32(settings.max_norm if clipping == "fixed" else jnp.inf)
    followed: AdaptiveClipState = optimizer_state[0]
    return followed.max_norm
