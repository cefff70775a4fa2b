"""Learning rates that work, with and without clipping.

With a smaller threshold, more learning rates work, and higher ones: nearly
every step is then as long as the threshold times the rate. So choose the
threshold first, then the rate. Clipping does not make every rate work, nor the
best accuracy better.

A recurrent network reads a digit row by row, with `clip_by_global_norm` first
in the optax chain. One compiled program trains ten rates side by side.
"""

import sys

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

from gradclip.integrations.optax import clip_by_global_norm

STEPS, BATCH, HIDDEN = 300, 32, 32
# Not 1.6: with max_norm=0.1, the last bits decide there if it works.
RATES = [0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.8, 3.2, 6.4, 12.8]

digits = load_digits()
images, labels = digits.images / 16, digits.target
random = np.random.default_rng(0)
batches = random.integers(0, 1400, (STEPS, BATCH))
weights = {
    "rows": random.normal(size=(8, HIDDEN)) / 8**0.5,
    "state": np.linalg.qr(random.normal(size=(HIDDEN, HIDDEN))).Q,
    "out": np.zeros((HIDDEN, 10)),
}


def scores(weights, images):
    state = jnp.zeros((len(images), HIDDEN), images.dtype)
    for row in range(8):
        seen = images[:, row] @ weights["rows"]
        state = jnp.tanh(seen + state @ weights["state"])
    return state @ weights["out"]


def loss(weights, images, labels):
    given = scores(weights, images)
    return optax.softmax_cross_entropy_with_integer_labels(given, labels).mean()


def accuracy(rate, max_norm):
    """Train at one learning rate; return the accuracy on test images."""
    clip = clip_by_global_norm(max_norm) if max_norm else optax.identity()
    optimizer = optax.chain(clip, optax.sgd(rate, momentum=0.9))

    def step(state, rows):
        weights, moments = state
        gradient = jax.grad(loss)(weights, *(data[rows] for data in train))
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(weights, updates), moments), None

    train = jnp.asarray(images), jnp.asarray(labels)
    start = (weights, optimizer.init(weights))
    (trained, _), _ = jax.lax.scan(step, start, batches)
    return (scores(trained, images[1400:]).argmax(1) == labels[1400:]).mean()


found = {}
for max_norm in (None, 1.0, 0.1):
    name = f"max_norm={max_norm:g}" if max_norm else "no clipping"
    of_rates = jax.vmap(lambda rate, limit=max_norm: accuracy(rate, limit))
    with jax.enable_x64(True):  # so that the figures repeat on any processor
        found[name] = np.asarray(jax.jit(of_rates)(np.array(RATES)))
    works = np.array(RATES)[found[name] > 0.8].tolist()
    print(f"{name:12} works at rates", works)

figure, axes = plt.subplots()
for (name, right), mark in zip(found.items(), "s^o", strict=True):
    axes.plot(RATES, right, mark + "-", label=name)
axes.set(xscale="log", ylim=(0, 1), xlabel="learning rate")
axes.set_title("Test accuracy after 300 steps")
axes.legend(loc="lower left")
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "learning_rates.svg")
