"""A training that needs clipping: the product of 20 weights learns to be 1, with momentum, on noisy data.

At a learning rate of 0.001 it learns without clipping; at 0.03 only with a low threshold. The loss of guessing 0 is 1,
the least is about 0.01.
"""

import numpy as np

import gradclip


def train(max_norm, learning_rate, seed, monitor=None, record_loss=True, steps=300):
    rng = np.random.default_rng(seed)
    weights, moved, losses = 0.9 + 0.1 * rng.standard_normal(20), np.zeros(20), []
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for _ in range(steps):
            x = rng.standard_normal(32)
            error = x * weights.prod() - (x + 0.1 * rng.standard_normal(32))
            losses.append(np.mean(error**2))
            grad = np.mean(2 * error * x) * weights.prod() / weights
            if monitor is not None and record_loss:
                monitor.note(loss=losses[-1])
            gradclip.clip_grad_norm_({"weights": grad}, max_norm, monitor=monitor)
            moved = 0.9 * moved + grad
            weights = weights - learning_rate * moved
        return float(np.mean(losses[-20:]))
