"""Train many runs of a task in one program. The rules see norms and decide on the host, as in a training loop."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

import gradclip


def trained(task, runs, *, watch=None, until=None):
    """Train runs, each a (rule, rate, seed), and return their figures. NaN: the run has diverged.

    A rule has `after(norm)`: the norm left; 0 skips the step. If it is `by_layer`, norms and what is left are vectors.
    Or it is `Within` the optimizer. `watch(losses, norms, left)` sees each step. `until` ends the runs early.
    """
    found, kinds = np.full(len(runs), math.nan), {}
    for place, (rule, _, _) in enumerate(runs):
        kinds.setdefault(_kind(rule), []).append(place)
    for kind, some in kinds.items():
        for first in range(0, len(some), task.together):
            places = some[first : first + task.together]
            found[places] = _together(task, kind, [runs[place] for place in places], watch, until)
    return found


class Within:
    """A rule that works on elements or units: `wrap` makes of an optimizer one that clips."""

    def __init__(self, wrap):
        self.wrap = wrap

    def after(self, norm):
        return norm


def _kind(rule):
    return getattr(rule, "wrap", None), getattr(rule, "by_layer", False)


def _together(task, kind, runs, watch, until):
    rules, rates, seeds = zip(*runs, strict=True)
    batches = {seed: task.batches(seed) for seed in set(seeds)}
    weights = _stacked([task.start(seed) for seed in seeds])
    init, measure, change, judge = _programs(task, *kind)
    state = init(weights)
    rates, alive = np.array(rates, np.float32), np.ones(len(runs), bool)
    for step in range(until or task.steps):
        seen = jax.tree.map(partial(_at, step), *(batches[seed] for seed in seeds))
        losses, grads, norms = measure(weights, seen)
        norms, losses = np.asarray(norms, np.float64), np.asarray(losses)
        each = norms if kind[1] else norms.tolist()
        left = np.array([rule.after(norm) for rule, norm in zip(rules, each, strict=True)])
        scale = np.where(left == norms, 1.0, left / np.where(norms == 0, 1.0, norms)).astype(np.float32)
        if watch is not None:
            watch(losses, norms, left)
        alive &= np.isfinite(losses)
        if not alive.any():
            break
        now = rates * np.float32(task.schedule(step / task.steps))
        # Zeros of one layer are a step of the others.
        skipped = (left == 0) & (~np.isfinite(norms) if kind[1] else norms != 0)
        weights, state = change(weights, state, grads, scale, now, ~skipped.reshape(len(runs), -1).any(1))
    figures = np.asarray(judge(weights), np.float64)
    return np.where(alive & np.isfinite(figures), figures, math.nan)


def _at(step, *of_seeds):
    return np.stack([batches[step] for batches in of_seeds])


def _stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@cache  # compiling takes seconds
def _programs(task, wrap, by_layer):
    optimizer = task.optimizer if wrap is None else wrap(task.optimizer)

    def measure(weights, batch):
        loss, grads = jax.value_and_grad(task.loss)(weights, batch)
        each = gradclip.layer_norms(grads) if by_layer else None
        return loss, grads, jnp.stack(jax.tree.leaves(each)) if by_layer else gradclip.global_norm(grads)

    def change(weights, state, grads, scale, rate, steps):
        leaves, structure = jax.tree.flatten(grads)
        scaled = [x * by for x, by in zip(leaves, jnp.broadcast_to(scale, len(leaves)), strict=True)]
        update, after = optimizer.update(jax.tree.unflatten(structure, scaled), state, weights)
        new = jax.tree.map(lambda x, u: x - rate * u, weights, update)
        return jax.tree.map(partial(jnp.where, steps), (new, after), (weights, state))

    return tuple(jax.jit(jax.vmap(program)) for program in (optimizer.init, measure, change, task.judge))
