"""Federated rounds with hostile clients.

What clients send can ruin a training, unless the server checks it. Five of
twenty clients are hostile: a NaN, an update turned round and 1,000 times too
long, one too long by less than float32 shows, one without an array, and one
turned round within the bound. No bound can refuse the last.

The server that trusts learns nothing. The one that clips again learns, but
keeps what the liars send in its mean. The one that asks `check_update` learns
best, and says why it refuses.
"""

import sys
import textwrap

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import gradclip

CLIENTS, ROUNDS, MAX_NORM = 20, 25, 1.0

digits = load_digits()
x, y = digits.data / 16, np.eye(10)[digits.target]
test_x, test_labels = x[1400:], digits.target[1400:]
shares = np.array_split(np.arange(1400), CLIENTS)


def scores(model, x):
    return x @ model["w"] + model["b"]


def honest(model, rows):
    """Return a client's update: five steps of gradient descent, clipped."""
    # In float64, so that the figures repeat on any processor.
    new = {name: np.float64(array) for name, array in model.items()}
    for _ in range(5):
        given = np.exp(scores(new, x[rows]))
        wrong = given / given.sum(1, keepdims=True) - y[rows]
        new["w"] -= 2 * x[rows].T @ wrong / len(rows)
        new["b"] -= 2 * wrong.mean(0)
    update = {name: np.float32(new[name] - model[name]) for name in model}
    return gradclip.clip_by_global_norm(update, MAX_NORM)[0]


def sent(model):
    """Return the updates of all clients: five are hostile."""
    updates = [honest(model, rows) for rows in shares]
    updates[0]["b"][3] = np.nan
    updates[1] = {name: -1000 * array for name, array in updates[1].items()}
    updates[2] = {"w": np.zeros((64, 10), np.float32), "b": updates[2]["b"] * 0}
    updates[2]["w"][0, :2] = 1.0, 2e-4
    del updates[3]["b"]
    updates[4] = {name: -array for name, array in updates[4].items()}
    return updates


def trusts(model, update):
    return update if update.keys() == model.keys() else None


def clips(model, update):
    whole = trusts(model, update)
    if whole is None:
        return None
    clip = gradclip.clip_by_global_norm
    return clip(whole, MAX_NORM, nonfinite="drop")[0]


def checks(model, update):
    checked = gradclip.check_update(update, MAX_NORM, like=model)
    return update if checked else None


def rounds(server):
    """Return the accuracy on test images after each round."""
    model = {"w": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)}
    right = []
    for _ in range(ROUNDS):
        taken = [server(model, update) for update in sent(model)]
        taken = [update for update in taken if update is not None]
        for name in model:
            model[name] += sum(update[name] for update in taken) / len(taken)
        right.append((scores(model, test_x).argmax(1) == test_labels).mean())
    return right


start = {"w": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)}
for number, update in enumerate(sent(start)[:6]):
    checked = gradclip.check_update(update, MAX_NORM, like=start)
    verdict = "accepted" if checked else f"REFUSED. {checked.reason}"
    verdict = f"client {number}: {verdict}"
    print(textwrap.fill(verdict, 80, subsequent_indent="  "))

figure, axes = plt.subplots()
for name, server in {
    "trusts": trusts,
    "clips": clips,
    "checks": checks,
}.items():
    with np.errstate(all="ignore"):
        right = rounds(server)
    print(f"a server that {name}: {right[-1]:.0%} of test images")
    axes.plot(range(1, ROUNDS + 1), right, "o-", label=f"{name} updates")
axes.set(ylim=(0, 1), xlabel="round")
axes.set_title("Test accuracy, 5 of 20 clients hostile")
axes.legend()
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "hostile_clients.svg")
