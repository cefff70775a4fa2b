"""Federated rounds with a privacy proof for whole clients: clip each client's update, add up, add exact noise.

A unit is a client with all its data (`unit="group"`): the model may be released, and nobody can tell from it whether a
client took part. Each client trains at home and clips its update by `clip_by_global_norm`. The server does not trust
the clients: `per_example_clip` clips again and adds up on a grid of integers, so the sum does not round. Epsilon counts
clients, not examples. Clients and the data are made up.
"""

import argparse

import numpy as np

import gradclip

CLIENTS = 2000
RATE = 0.1  # the share of clients in a round
MAX_NORM = 0.5
GRID = 2**20  # integer steps in MAX_NORM
DELTA = 1e-5
TRUE = {"w": np.array([[1.0, -1.0], [0.5, 2.0], [-1.5, 0.0]]), "b": np.array([0.3, -0.3])}


def client_update(model, client):
    """Return the update of a client that trains on its own examples, from 5 to 30, clipped at home."""
    rng = np.random.default_rng(client)
    x = rng.normal(size=(rng.integers(5, 31), 3))
    y = x @ TRUE["w"] + TRUE["b"] + 0.1 * rng.normal(size=(len(x), 2))
    local = {name: value.copy() for name, value in model.items()}
    for _ in range(5):
        error = x @ local["w"] + local["b"] - y
        local["w"] -= 0.1 * x.T @ error / len(x)
        local["b"] -= 0.1 * error.mean(axis=0)
    return gradclip.clip_by_global_norm({name: local[name] - model[name] for name in model}, MAX_NORM)[0]


def federated_round(model, clients, mask):
    """Return the sum of the clipped updates of a round, in steps of MAX_NORM / GRID. A place without a client is 0."""
    updates = {name: np.zeros((len(mask), *value.shape)) for name, value in model.items()}
    for place in np.flatnonzero(mask):
        for name, part in client_update(model, clients[place]).items():
            updates[name][place] = part
    return gradclip.per_example_clip(updates, MAX_NORM, mask=mask, grid=GRID)[0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    batches = gradclip.PoissonBatches(CLIENTS, RATE, steps=rounds)
    sensitivity = gradclip.clipped_sum_sensitivity(MAX_NORM, unit="group", batch_size=batches.pad_to, grid=GRID)
    run = gradclip.PrivateRun(batches, sensitivity, epsilon=2.0, delta=DELTA)
    model = {"w": np.zeros((3, 2)), "b": np.zeros(2)}
    for clients, mask in batches:
        noisy = run.add_noise(federated_round(model, clients, mask))
        model = {name: model[name] + noisy[name] * (MAX_NORM / GRID) / (RATE * CLIENTS) for name in model}
    error = max(np.abs(model[name] - TRUE[name]).max() for name in model)
    print(run)
    print(f"{rounds} rounds of about {RATE * CLIENTS:.0f} clients: epsilon {run.epsilon():.2f} for a whole client")
    print(f"largest error of a parameter: {error:.2f}, of {max(np.abs(v).max() for v in TRUE.values()):g}")


if __name__ == "__main__":
    main()
