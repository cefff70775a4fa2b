"""Train a small convolutional network that may be released, in PyTorch. Compare it with Opacus at equal epsilon.

Every step (Abadi et al. 2016) samples each image with probability RATE by the system's cryptographic generator, clips
what the image adds, adds up, and adds exact discrete noise. What an image adds is its gradient, in units of the
threshold, and three numbers for the log: the loss, whether it was right, and whether its gradient was below the
threshold. All are one vector, so one noise protects them together. Whatever is printed or used between steps is read
from the noisy vector: the log, the threshold, the network. The test images are public.

Learning rate and first threshold are chosen for each library by `--choose`: it trains on 1,152 of the training images
and looks at the other 288, not at the test images.

`python examples/private_cnn_torch.py` takes some minutes; `--seeds 1 --steps 8` some seconds.
"""

import argparse
import math
import statistics
import time

import opacus
import torch
from sklearn.datasets import load_digits
from torch.func import functional_call, grad_and_value
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gradclip

TRAINING = 1440  # of 1,797 images; the others are the test
VALIDATION = 288  # of those for training, if settings are chosen
RATE = 0.25
CHANNELS = 16
DELTA = 1e-4
SETTINGS = {"gradclip": (4.0, 0.5), "Opacus": (4.0, 0.5)}  # learning rate and threshold, by --choose
CHOICES = [(rate, norm) for norm in (0.5, 1.0, 2.0) for rate in (2.0, 4.0, 8.0)]
SHARE = 0.1  # the norm of the numbers for the log, where a gradient has norm 1: noise grows by 0.5%


def network(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, CHANNELS, 3, stride=2, padding=1),
        torch.nn.Tanh(),
        torch.nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * CHANNELS, 10),
    )
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.zeros_(parameter)
        else:
            torch.nn.init.kaiming_normal_(parameter, nonlinearity="linear")
    return model


def with_gradclip(images, labels, epsilon, steps, seed, learning_rate, max_norm):
    model, expected = network(seed), RATE * len(images)
    # These share memory with the model's parameters, so they follow the updates.
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss_of(parameters, image, label):
        logits = functional_call(model, parameters, (image,))
        return cross_entropy(logits, label), logits

    def of_one_image(parameters, threshold, image, label):
        """Return what one image adds to the sum: its gradient / threshold, and three numbers from -1 to 1."""
        gradient, (loss, logits) = grad_and_value(loss_of, has_aux=True)(parameters, image, label)
        right, below = (logits.argmax(1) == label)[0], gradclip.global_norm(gradient) <= threshold
        numbers = torch.stack([(loss / 2 - 1).clamp(-1, 1), 2.0 * right - 1, 2.0 * below - 1])
        return {"gradient": {name: g / threshold for name, g in gradient.items()}, "log": numbers * SHARE / 3**0.5}

    batches = gradclip.PoissonBatches(len(images), RATE, steps=steps)
    clipped_sum = gradclip.clipped_fun(
        of_one_image, {"gradient": 1.0, "log": SHARE}, batch_argnums=(2, 3), pad_to=batches.pad_to
    )
    run = gradclip.PrivateRun(batches, clipped_sum.sensitivity(), epsilon=epsilon, delta=DELTA)
    rule = gradclip.PrivateQuantile(quantile=0.5, learning_rate=0.02, initial=max_norm)
    state = rule.init(like=images)
    times, noise, log = [], [], []
    for rows, mask in batches:
        start = time.process_time()
        threshold = rule.max_norm(state)
        summed = clipped_sum(parameters, threshold, images[rows], labels[rows], mask=mask)
        before = time.process_time()
        noisy = run.add_noise(summed)
        noise.append(time.process_time() - before)
        loss, right, below = noisy["log"] * 3**0.5 / SHARE / expected
        state = rule.observe_fraction(state, (1 + below) / 2)
        for name, parameter in parameters.items():
            parameter -= learning_rate * threshold * noisy["gradient"][name] / expected
        log.append((2 + 2 * float(loss), (1 + float(right)) / 2, float(threshold)))
        times.append(time.process_time() - start)
    if seed == 0:
        loss, right, threshold = map(statistics.mean, zip(*log[-10:], strict=True))
        print(run)
        print(f"last steps, from noisy sums: loss {loss:.2f}, accuracy {right:.0%}, threshold {threshold:.3f}")
    return model, run.epsilon(), times, noise


def with_opacus(images, labels, epsilon, steps, seed, learning_rate, max_norm):
    data = TensorDataset(images, labels)
    model, engine = network(seed), opacus.PrivacyEngine(accountant="prv")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=learning_rate),
        data_loader=DataLoader(data, int(RATE * len(images))),  # Opacus samples with probability 1 / len(loader)
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=steps * RATE,
        max_grad_norm=max_norm,
    )
    times = []
    while len(times) < steps:
        for batch, targets in loader:
            start = time.process_time()
            optimizer.zero_grad()
            cross_entropy(model(batch), targets).backward()
            optimizer.step()
            times.append(time.process_time() - start)
    return model, engine.get_epsilon(DELTA), times, []


LIBRARIES = {"gradclip": with_gradclip, "Opacus": with_opacus}


@torch.no_grad()
def accuracy_of(model, images, labels):
    return float((model(images).argmax(1) == labels).float().mean())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[3.0, 8.0])
    parser.add_argument("--choose", action="store_true", help="try settings on validation images")
    options = parser.parse_args()
    # A network this small is faster on one thread than on several.
    torch.set_num_threads(1)
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[order, None]
    labels = torch.tensor(digits.target)[order]
    training, test = (images[:TRAINING], labels[:TRAINING]), (images[TRAINING:], labels[TRAINING:])
    if options.choose:
        parts = [tuple(part[:-VALIDATION] for part in training), tuple(part[-VALIDATION:] for part in training)]
        for name, train in LIBRARIES.items():
            choose(name, train, parts)
        return
    size = sum(p.numel() for p in network(0).parameters())
    print(f"{size} parameters, {options.steps} steps, {options.seeds} seeds, delta {DELTA:g}")
    for epsilon in options.epsilons:
        accuracies = {}
        for name, train in LIBRARIES.items():
            runs = [train(*training, epsilon, options.steps, seed, *SETTINGS[name]) for seed in range(options.seeds)]
            accuracies[name] = [accuracy_of(run[0], *test) for run in runs]
            report(name, runs, accuracies[name])
        if options.seeds > 1:
            compare(accuracies)


def choose(name, train, data):
    """Print the accuracy on validation images of some settings, and the best of them."""
    found = {}
    for settings in CHOICES:
        runs = [train(*data[0], 3.0, 100, seed, *settings) for seed in (100, 101)]
        found[settings] = statistics.mean(accuracy_of(run[0], *data[1]) for run in runs)
        print(f"{name:11} learning rate {settings[0]:g}, threshold {settings[1]:g}: {found[settings]:.1%}", flush=True)
    best = max(found, key=found.get)
    print(f"{name}: learning rate {best[0]:g} and threshold {best[1]:g} are the best\n")


def report(name, runs, accuracies):
    """Print the means of some runs: epsilon, accuracy on the test, and the processor time of a step."""
    spent = math.ceil(1000 * max(run[1] for run in runs)) / 1000
    each = statistics.median(taken for run in runs for taken in run[2])
    noise = statistics.median(taken for run in runs for taken in run[3] or [0.0])
    of_noise = f", of which exact noise {1000 * noise:.1f}" if noise else ""
    print(
        f"{name:11} epsilon {spent:.3f}, test accuracy {statistics.mean(accuracies):.1%} "
        f"± {spread_of(accuracies):.1%}, {1000 * each:.1f} ms/step{of_noise}"
    )


def spread_of(accuracies):
    """Return the standard deviation, 0 for a single run."""
    return statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0


def compare(accuracies):
    """Say whether gradclip is worse than the other library by more than a standard deviation."""
    (ours, theirs), spread = map(statistics.mean, accuracies.values()), max(map(spread_of, accuracies.values()))
    print(f"gradclip is worse by more than one standard deviation: {'yes' if ours < theirs - spread else 'no'}\n")


if __name__ == "__main__":
    main()
