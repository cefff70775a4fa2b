"""Train many runs of a task in one program. The rules see norms and decide on the host, as in a training loop."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradclip


def trained(task, runs, *, watch=None, until=None):
    """Train runs, each a (rule, rate, seed), and return their figures. NaN: the run has diverged.

    A rule has `after(norm)`: the norm left; 0 skips the step. Or it is a `PerUnit`, which works on the gradients.
    `watch(losses, norms, left)` sees each step. `until` ends the runs early.
    """
    found = np.full(len(runs), math.nan)
    whole = [place for place, run in enumerate(runs) if not isinstance(run[0], PerUnit)]
    units = [place for place, run in enumerate(runs) if isinstance(run[0], PerUnit)]
    for some in (whole, units):
        for first in range(0, len(some), task.together):
            places = some[first : first + task.together]
            found[places] = _together(task, [runs[place] for place in places], watch, until)
    return found


class PerUnit:
    """optax.adaptive_grad_clip (Brock et al. 2021): each unit's norm at most `clipping` times its weights'."""

    def __init__(self, clipping):
        self.clipping = clipping


def _together(task, runs, watch, until):
    rules, rates, seeds = zip(*runs, strict=True)
    batches = {seed: task.batches(seed) for seed in set(seeds)}
    weights = _stacked([task.start(seed) for seed in seeds])
    state = jax.vmap(task.optimizer.init)(weights)
    measure, change, judge = _programs(task, next((rule.clipping for rule in rules if isinstance(rule, PerUnit)), None))
    rates, alive = np.array(rates, np.float32), np.ones(len(runs), bool)
    for step in range(until or task.steps):
        seen = jax.tree.map(partial(_at, step), *(batches[seed] for seed in seeds))
        losses, grads, norms = measure(weights, seen)
        norms, losses = np.asarray(norms, np.float64), np.asarray(losses)
        left = np.array([_after(rule, norm) for rule, norm in zip(rules, norms.tolist(), strict=True)])
        scale = np.where(left == norms, 1.0, left / np.where(norms == 0, 1.0, norms)).astype(np.float32)
        if watch is not None:
            watch(losses, norms, left)
        alive &= np.isfinite(losses)
        if not alive.any():
            break
        now = rates * np.float32(task.schedule(step / task.steps))
        weights, state = change(weights, state, grads, scale, now, (left > 0) | (norms == 0) | np.isnan(left))
    figures = np.asarray(judge(weights), np.float64)
    return np.where(alive & np.isfinite(figures), figures, math.nan)


def _after(rule, norm):
    return norm if isinstance(rule, PerUnit) else rule.after(norm)


def _at(step, *of_seeds):
    return np.stack([batches[step] for batches in of_seeds])


def _stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@cache  # compiling takes seconds
def _programs(task, clipping):
    def measure(weights, batch):
        loss, grads = jax.value_and_grad(task.loss)(weights, batch)
        if clipping is not None:
            grads = optax.adaptive_grad_clip(clipping).update(grads, (), weights)[0]
        return loss, grads, gradclip.global_norm(grads)

    def change(weights, state, grads, scale, rate, steps):
        scaled = jax.tree.map(lambda x: x * scale, grads)
        update, after = task.optimizer.update(scaled, state, weights)
        new = jax.tree.map(lambda x, u: x - rate * u, weights, update)
        return jax.tree.map(partial(jnp.where, steps), (new, after), (weights, state))

    return tuple(jax.jit(jax.vmap(program)) for program in (measure, change, task.judge))
