"""The rules that the trainings compare: none, fixed thresholds over four decades, gradclip's, and those of others."""

import importlib.util
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from published_rules import AutoClip, Fixed, Ours, OursBySpread, ZClip, clipped
from training_runs import Within

import gradclip
from gradclip.integrations.optax import clip_by_block_rms


class NoClipping:
    """Leaves every norm as it is."""

    limit = math.inf

    def after(self, norm):
        return norm


class InstalledSmartClip:
    """The rule of the smartclip package with its defaults, as its own code computes it."""

    def __init__(self):
        import smartclip

        self.rule = smartclip.AutoClip()

    def after(self, norm):
        self.rule.observe(norm)
        return clipped(norm, self.rule.threshold()) if self.rule.can_clip() else norm


class ByLayer:
    """One of gradclip's rules for each parameter, which follows its own norms, with nonfinite="drop"."""

    by_layer = True

    def __init__(self, rule):
        self.rule, self.history = rule, None

    def after(self, norms):
        history = self.rule.init(shape=norms.shape) if self.history is None else self.history
        self.history = self.rule.observe(history, norms)
        return np.where(np.isfinite(norms), np.minimum(norms, self.rule.max_norm(history)), 0.0)


class AdaGCByLayer:
    """AdaGC for each parameter, as `published_rules` has it for one; at first, all are clipped by their global norm.

    The trainings are short, so that is for 20 steps, not 100.
    """

    by_layer = True

    def __init__(self, absolute=1.0, relative=1.05, beta=0.98, warmup=20):
        self.absolute, self.relative, self.beta, self.warmup = absolute, relative, beta, warmup
        self.averages, self.step = math.inf, 0

    def after(self, norms):
        self.step += 1
        if self.step <= self.warmup:
            left = norms * min(1.0, self.absolute / max(np.linalg.norm(norms), 1e-30))
            self.averages = np.minimum(self.averages, left)
        else:
            left = np.minimum(norms, self.relative * self.averages)
            self.averages = self.beta * self.averages + (1 - self.beta) * left
        return left


def agc(optimizer):
    """Limit each unit's norm to 0.01 times its weights': Brock et al. 2021, as in optax."""
    return optax.chain(optax.adaptive_grad_clip(0.01), optimizer)


def by_update(optimizer):
    """Limit the root mean square of each array's update to 1: Shazeer and Stern 2018, section 6."""
    return optax.chain(optimizer, clip_by_block_rms(1.0))


def spam(optimizer, most=5000.0, beta=0.999, every=500, warmup=150):
    """Cut elements whose square is `most` times its average, and forget all moments now and then.

    SPAM, Huang et al. 2025, arXiv 2501.06842, around any optimizer. After each reset the rate rises along a cosine.
    """

    def init(params):
        return jnp.zeros((), int), jax.tree.map(jnp.zeros_like, params), optimizer.init(params)

    def update(grads, state, params):
        again = (state[0] > 0) & (state[0] % every == 0)
        count, squares, inner = jax.tree.map(
            lambda new, old: jnp.where(again, new, old), init(params), (state[0] % every, *state[1:])
        )
        cut = jax.tree.map(
            lambda g, v: jnp.where((v > 0) & (g * g > most * v), jnp.sign(g) * jnp.sqrt(most * v), g), grads, squares
        )
        squares = jax.tree.map(lambda g, v: beta * v + (1 - beta) * g * g, cut, squares)
        updates, inner = optimizer.update(cut, inner, params)
        rising = (state[0] >= every) & (count < warmup)
        share = jnp.where(rising, 0.5 - 0.5 * jnp.cos(jnp.pi * (count + 1) / warmup), 1.0)
        return jax.tree.map(lambda u: share * u, updates), (state[0] + 1, squares, inner)

    return optax.GradientTransformation(init, update)


def quantile(factor, share):
    return Ours(gradclip.QuantileRule(factor=factor, quantile=share))


FIXED = tuple(float(f"{10 ** (half / 2):.1g}") for half in range(-4, 5))
RULES = {
    "none": NoClipping,
    **{f"fixed {threshold:g}": partial(Fixed, threshold) for threshold in FIXED},
    "AdaptiveThreshold": OursBySpread,
    "SteadyRule": lambda: Ours(gradclip.SteadyRule()),
    "twice the median": partial(quantile, 2.0, 0.5),
    "quantile 0.1": partial(quantile, 1.0, 0.1),
    "quantile 0.5": partial(quantile, 1.0, 0.5),
    "quantile 0.9": partial(quantile, 1.0, 0.9),
    "SpreadRule by layer": lambda: ByLayer(gradclip.SpreadRule()),
    "SteadyRule by layer": lambda: ByLayer(gradclip.SteadyRule()),
    "twice the median by layer": lambda: ByLayer(gradclip.QuantileRule()),
    "AdaGC by layer": AdaGCByLayer,
    "SPAM": partial(Within, spam),
    "AGC 0.01": partial(Within, agc),
    "update RMS 1": partial(Within, by_update),
    "ZClip": ZClip,
    "AutoClip": AutoClip,
    "smartclip": InstalledSmartClip,
}
INSTALLED = [name for name in RULES if name != "smartclip" or importlib.util.find_spec("smartclip")]
SHORT = ["none", "fixed 0.1", "fixed 1", "AdaptiveThreshold", "twice the median"]
