"""One training run, with all seeds in parallel. All kinds of clipping run the same code."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradclip import global_norm, layer_norms
from gradclip.demo import digits_rnn
from gradclip.demo.results import Curves
from gradclip.demo.settings import DemoSettings
from gradclip.integrations.optax import AdaptiveClipState, adaptive_clip_by_global_norm, clip_by_global_norm
from gradclip.monitor.monitor import Monitor

BATCH = 32
MOMENTUM = 0.9
CHUNK = 100

Clipping = Literal["none", "fixed", "adaptive"]

# loss, norm, threshold, norms of layers
_Measured = tuple[jax.Array, jax.Array, jax.Array, digits_rnn.Parameters]


class _State(NamedTuple):
    parameters: digits_rnn.Parameters
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
    digits = digits_rnn.load()
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
    test = jax.vmap(digits_rnn.accuracy, in_axes=(0, None, None))
    correct = jax.jit(test)(state.parameters, digits.test_pixels, digits.test_digits)
    losses, norms, max_norms = (np.concatenate(parts, 1) for parts in zip(*of_chunks, strict=True))
    return Curves(losses, norms, max_norms, np.asarray(correct))


def _optimizer(settings: DemoSettings, clipping: Clipping) -> optax.GradientTransformation:
    schedule = optax.cosine_decay_schedule(settings.learning_rate, settings.steps)
    sgd = optax.sgd(schedule, momentum=MOMENTUM)
    clip = clip_by_global_norm(settings.max_norm) if clipping == "fixed" else adaptive_clip_by_global_norm()
    return sgd if clipping == "none" else optax.chain(clip, sgd)


def _start(seeds: int, optimizer: optax.GradientTransformation) -> _State:
    drawn = [digits_rnn.init(seed) for seed in range(seeds)]
    parameters = jax.tree.map(lambda *weights: jnp.stack(weights), *drawn)
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    return _State(parameters, jax.vmap(optimizer.init)(parameters), keys)


def _chunk_runner(
    digits: digits_rnn.Digits, optimizer: optax.GradientTransformation, threshold: Callable[[Any], jax.Array]
) -> Callable[[_State, int], tuple[_State, _Measured]]:
    def step(state: _State, _: None) -> tuple[_State, _Measured]:
        key, draw = jax.random.split(state.key)
        rows = jax.random.randint(draw, (BATCH,), 0, len(digits.train_digits))
        batch = digits.train_pixels[rows], digits.train_digits[rows]
        loss, gradient = jax.value_and_grad(digits_rnn.loss)(state.parameters, *batch)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer)
        parameters = optax.apply_updates(state.parameters, updates)
        measured = loss, global_norm(gradient), threshold(optimizer_state), layer_norms(gradient)
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
