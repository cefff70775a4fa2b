"""Private training: accuracy against epsilon.

How much accuracy does privacy cost? Epsilon says how much the model may reveal
of any one image: less is more private. Each epsilon is trained with three
seeds, so that the figures repeat. For a model that is released, leave out
`seed=` and `rng=`: the noise is then exact, from numbers that nobody knows.
"""

import sys

import jax
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import gradclip

EPSILONS, SEEDS = [0.25, 0.5, 1, 2, 4, 8], 3
STEPS, RATE, LEARNING_RATE = 50, 0.2, 4.0

digits = load_digits()
x, y = np.float32(digits.data / 16), np.int32(digits.target)
test_x, test_y = x[1440:], y[1440:]
x, y = x[:1440], y[:1440]


def loss(params, x, y):
    return -jax.nn.log_softmax(x @ params["w"] + params["b"])[y]


def accuracy(params):
    return np.mean((test_x @ params["w"] + params["b"]).argmax(1) == test_y)


def batches_of(seed):
    return gradclip.PoissonBatches(n=len(x), rate=RATE, steps=STEPS, seed=seed)


pad_to = batches_of(0).pad_to
clipped = gradclip.clipped_grad(
    loss,
    max_norm=1.0,
    batch_argnums=(1, 2),
    keep_batch_dim=False,
    pad_to=pad_to,
)
sensitivity, compiled = clipped.sensitivity(), jax.jit(clipped)


def train(epsilon, seed):
    """Train within epsilon; return the accuracy, and the run that counted."""
    batches, rng = batches_of(seed), np.random.default_rng(seed)
    limits = {"epsilon": epsilon, "delta": 1e-4}
    run = gradclip.PrivateRun(batches, sensitivity, **limits, rng=rng)
    params = {"w": np.zeros((64, 10)), "b": np.zeros(10)}
    for rows, mask in batches:
        summed = compiled(params, x[rows], y[rows], mask=mask)
        noisy = run.add_noise(jax.tree.map(np.asarray, summed))
        for name in params:
            params[name] -= LEARNING_RATE * noisy[name] / (RATE * len(x))
    return accuracy(params), run


def train_openly():
    """Train on all images without clipping and without noise."""

    def mean_loss(params):
        return jax.vmap(loss, (None, 0, 0))(params, x, y).mean()

    gradient = jax.jit(jax.grad(mean_loss))
    params = {"w": np.zeros((64, 10)), "b": np.zeros(10)}
    for _ in range(STEPS):
        found = gradient(params)
        for name in params:
            params[name] -= LEARNING_RATE * np.asarray(found[name])
    return accuracy(params)


open_accuracy = train_openly()
print(f"not private: {open_accuracy:.0%} of test images")
found = []
for epsilon in EPSILONS:
    runs = [train(epsilon, seed) for seed in range(SEEDS)]
    found.append([right for right, _ in runs])
    spread = f"{min(found[-1]):.0%} to {max(found[-1]):.0%}"
    noise = runs[0][1].noise_multiplier
    print(f"epsilon {epsilon:4}: noise multiplier {noise:5.2f}, {spread}")

figure, axes = plt.subplots()
axes.axhline(open_accuracy, label="not private")
axes.plot(EPSILONS, np.median(found, axis=1), "o-", color="C2", label="private")
lowest, highest = np.min(found, axis=1), np.max(found, axis=1)
axes.fill_between(EPSILONS, lowest, highest, color="C2", alpha=0.2)
axes.set(xscale="log", ylim=(0, 1), xlabel="epsilon, from more to less private")
axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
axes.minorticks_off()
axes.set_title("Test accuracy: median and range of 3 seeds")
axes.legend(loc="lower right")
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "private_epsilon.svg")
