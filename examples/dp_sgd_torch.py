"""Train privately with PyTorch and compare with Opacus. gradclip clips, dp-accounting computes epsilon.

DP-SGD (Abadi et al. 2016): each step samples every example with probability RATE, clips its gradient, adds the clipped
gradients, and adds noise proportional to the sensitivity of the sum. Batches are padded to one size, because the last
bits of gradients depend on the batch size. Examples go to random rows: adding or removing one does not change how the
others are distributed. The printed plan says how the gradient of each parameter is measured: of the large ones none is
made. `torch.randn` is not cryptographically secure: learn from this script, but do not release models trained with it.
`private_cnn_torch.py` trains one that may be released.
"""

import argparse
import statistics
import time

import dp_accounting
import opacus
import torch
from sklearn.datasets import load_digits
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import gradclip

MAX_NORM = 1.0
NOISE_MULTIPLIER = 2.0
RATE = 0.1
LEARNING_RATE = 1.0
DELTA = 1e-4
WIDTH = 256


def gradclip_step(model, expected, largest):
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(parameters, features, labels):
        return cross_entropy(functional_call(model, parameters, (features,)), labels)

    clipped_grad = gradclip.clipped_grad(loss_of, MAX_NORM, batch_argnums=(1, 2), pad_to=largest)
    print(clipped_grad.plan(parameters, torch.zeros(largest, 64), torch.zeros(largest, dtype=torch.int64)))
    sensitivity = clipped_grad.sensitivity("add_or_remove_one")
    noise_std = sensitivity.noise_std(NOISE_MULTIPLIER)
    print(f"gradclip: {sensitivity}; noise {noise_std:.7f}")

    def step(features, labels):
        features, labels, mask = scattered(features, labels, largest)
        summed = clipped_grad(parameters, features, labels, mask=mask)
        for name, p in parameters.items():
            p -= LEARNING_RATE * (summed[name] + noise_std * torch.randn_like(p)) / expected

    return step


def scattered(features, labels, size):
    """Return a batch of `size` with the examples in random rows, and a mask of those rows."""
    if len(features) > size:
        raise RuntimeError(f"a batch of {len(features)} examples does not fit into {size}: start again.")
    places = torch.randperm(size)[: len(features)]
    x, y = features.new_zeros(size, *features.shape[1:]), labels.new_zeros(size)
    x[places], y[places] = features, labels
    mask = torch.zeros(size, dtype=torch.bool)
    mask[places] = True
    return x, y, mask


def opacus_step(model, expected, largest):
    wrapped = opacus.GradSampleModule(model)
    optimizer = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=MAX_NORM,
        expected_batch_size=expected,
    )

    def step(features, labels):
        optimizer.zero_grad()
        cross_entropy(wrapped(features), labels).backward()
        optimizer.step()

    return step


def plain_step(model, expected, largest):
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step(features, labels):
        optimizer.zero_grad()
        (cross_entropy(model(features), labels, reduction="sum") / expected).backward()
        optimizer.step()

    return step


def epsilon(steps):
    """Return the epsilon of all steps together, for adding or removing one example."""
    accountant = dp_accounting.rdp.RdpAccountant(orders=[1 + k / 4 for k in range(4, 100)])
    step = dp_accounting.PoissonSampledDpEvent(RATE, dp_accounting.GaussianDpEvent(NOISE_MULTIPLIER))
    accountant.compose(step, steps)
    return accountant.get_epsilon(DELTA)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 10))


def train(models, makers, steps, features, labels):
    """Train the models on the same batches, one step each in turn. Return each model's median time per step."""
    expected = RATE * len(features)
    # Six standard deviations above the expected size. About one batch in a billion is larger.
    largest = int(expected + 6 * expected**0.5)
    takers = [make(model, expected, largest) for model, make in zip(models, makers, strict=True)]
    times = [[] for _ in takers]
    for _ in range(steps):
        chosen = torch.rand(len(features)) < RATE
        for taken, step in zip(times, takers, strict=True):
            start = time.perf_counter()
            step(features[chosen], labels[chosen])
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    # A network this small is faster on one thread than on several.
    torch.set_num_threads(1)
    digits = load_digits()
    features, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    makers = {"gradclip": gradclip_step, "Opacus": opacus_step, "not private": plain_step}
    models = [network() for _ in makers]
    seconds = train(models, makers.values(), steps, features[:1500], labels[:1500])
    print(f"{steps} steps, delta {DELTA:g}, noise multiplier {NOISE_MULTIPLIER:g}")
    print(f"{'':12} {'epsilon':>8} {'accuracy':>9} {'ms/step':>8}")
    for name, model, each in zip(makers, models, seconds, strict=True):
        spent = float("inf") if name == "not private" else epsilon(steps)
        right = (model(features[1500:]).argmax(1) == labels[1500:]).float().mean()
        print(f"{name:12} {spent:8.2f} {right:9.1%} {1000 * each:8.2f}")


if __name__ == "__main__":
    main()
