"""Train on few digits until gradients are small, then on all: `python stale_moments.py [--seeds N]`.

Adam's second moments are then too small for what comes, so its updates are large. Prints the median accuracy after the
change, in percent, for each way to step and each learning rate. Needs pytorch_optimizer, for its StableAdamW.
"""

import argparse
import statistics
from functools import partial

import pytorch_optimizer
import torch
from sklearn.datasets import load_digits
from torch.nn import Linear, ReLU

import gradclip

RATES = (0.003, 0.01, 0.02, 0.04)
QUIET, AFTER, FEW, SEEN = 1500, 300, 3, 1200


def adam(parameters, rate, clip=None):
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    if clip is not None:
        clip(optimizer)
    return optimizer


WAYS = {
    "AdamW": adam,
    "clip_at_step(1)": partial(adam, clip=lambda optimizer: gradclip.clip_at_step(optimizer, 1.0)),
    "clip_update_at_step(1)": partial(adam, clip=lambda optimizer: gradclip.clip_update_at_step(optimizer, 1.0)),
    "clip_update_at_step(0.5)": partial(adam, clip=lambda optimizer: gradclip.clip_update_at_step(optimizer, 0.5)),
    "StableAdamW": lambda parameters, rate: pytorch_optimizer.StableAdamW(parameters, lr=rate, betas=(0.9, 0.999)),
    "Adafactor": lambda parameters, rate: torch.optim.Adafactor(parameters, lr=rate),
}


def accuracy(make, rate, seed, pixels, digits):
    """Return the share of unseen digits that a network gets right after the change."""
    torch.manual_seed(seed)
    network = torch.nn.Sequential(
        Linear(64, 64), ReLU(), Linear(64, 64), ReLU(), Linear(64, 64), ReLU(), Linear(64, 10)
    )
    optimizer = make(network.parameters(), rate)
    few = (digits[:SEEN] < FEW).nonzero().flatten()
    for step in range(QUIET + AFTER):
        pool = few if step < QUIET else torch.arange(SEEN)
        rows = pool[torch.randint(len(pool), (32,))]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(pixels[rows]), digits[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        return (network(pixels[SEEN:]).argmax(-1) == digits[SEEN:]).float().mean().item()


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=5)
    seeds = options.parse_args().seeds
    torch.set_num_threads(1)
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pixels, digits = torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]
    print(f"{'learning rate':<26}" + "".join(f"{rate:>8g}" for rate in RATES))
    for name, make in WAYS.items():
        found = [[accuracy(make, rate, seed, pixels, digits) for seed in range(seeds)] for rate in RATES]
        print(f"{name:<26}" + "".join(f"{100 * statistics.median(each):8.0f}" for each in found), flush=True)


if __name__ == "__main__":
    main()
