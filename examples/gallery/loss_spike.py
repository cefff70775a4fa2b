"""A loss spike: found, explained and skipped.

One record of the training set is broken: its pixels are 1,000 times too large,
and its label is wrong. Each epoch meets it once. The network is trained three
times: without clipping, with a fixed threshold, and with a threshold that
follows the norms and skips the steps that are far above it.

Without clipping, the loss jumps twice, and the accuracy at the end is far below
that of the others. With `max_norm=1` the broken record moves the weights by one
ordinary step in a wrong direction: a small bump at each dotted line. With
`skip_above=4` it does nothing at all. Bumps elsewhere are those of ordinary
batches at this learning rate.

`Monitor` keeps the steps of spikes, with what the loop said of the batch.
`explain_spike` then ranks the images of that batch by the norms of their
gradients.
"""

import sys

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import gradclip

EPOCHS, BATCH, BROKEN = 3, 32, 700

digits = load_digits()
x, y = torch.tensor(digits.data / 16), torch.tensor(digits.target)
test_x, test_y = x[1400:], y[1400:]
x, y = x[:1400], y[:1400]
x[BROKEN] *= 1000  # the planted fault
y[BROKEN] = (y[BROKEN] + 5) % 10


def train(max_norm, monitor):
    """Return the model, and its loss on the test images after each step."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    model = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(EPOCHS):
        for ids in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            loss = cross_entropy(model(x[ids]), y[ids])
            loss.backward()
            monitor.note(loss=loss, context=ids)
            named = model.named_parameters()
            gradclip.clip_grad_norm_(named, max_norm, monitor=monitor)
            optimizer.step()
            with torch.no_grad():
                losses.append(float(cross_entropy(model(test_x), test_y)))
    right = (model(test_x).argmax(1) == test_y).double().mean()
    return model, losses, float(right)


ways = {
    "no clipping": float("inf"),
    "max_norm=1": 1.0,
    "skip_above=4": gradclip.AdaptiveThreshold(skip_above=4.0),
}
curves = {}
for name, max_norm in ways.items():
    monitor = gradclip.Monitor()
    model, curves[name], right = train(max_norm, monitor)
    print(f"{name:12} test accuracy {right:.0%}, {monitor.num_skipped} skipped")

spikes = sorted(monitor.spikes, key=lambda spike: spike.step)
print("spikes at steps", [spike.step for spike in spikes])


def loss_of_one(params, x, y):
    return cross_entropy(torch.func.functional_call(model, params, (x,)), y)


ids = spikes[-1].context
params = dict(model.named_parameters())
found = gradclip.explain_spike(loss_of_one, params, batch=(x[ids], y[ids]))
worst, second = found.examples[:2]
print("image", int(ids[worst.place]), "made the last spike;", end=" ")
print("10 times the norm of any other:", worst.norm > 10 * second.norm)

figure, (upper, lower) = plt.subplots(2, sharex=True)
for name, losses in curves.items():
    for axes in (upper, lower):
        axes.plot(range(1, len(losses) + 1), losses, label=name)
for spike in spikes:
    for axes in (upper, lower):
        axes.axvline(spike.step, color="0.7", linestyle=":", zorder=0)
upper.set(yscale="log", title="Loss on test images; dotted: the broken image")
lower.set(ylim=(0, 2.5), xlabel="step")
upper.legend()
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "loss_spike.svg")
