"""A loss spike: found, explained and skipped.

`Monitor` finds the steps of loss spikes, `explain_spike` the image that made
them, and `skip_above` keeps such steps from the weights. One image of the
training set is broken: its pixels are 1,000 times too large, and its label is
wrong. The dotted lines are the steps that meet it.

Without clipping, the loss jumps twice. With `max_norm=1` the broken image moves
the weights by one ordinary step in a wrong direction. With `skip_above=4` it
does nothing at all.
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
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.5)
    gradclip.clip_at_step(optimizer, max_norm, monitor=monitor)
    losses = []
    for _ in range(EPOCHS):
        for ids in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            loss = cross_entropy(model(x[ids]), y[ids])
            loss.backward()
            monitor.note(loss=loss, context=ids)
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


def loss_of_one(params, x, y):
    return cross_entropy(torch.func.functional_call(model, params, (x,)), y)


figure, axes = plt.subplots()
for name, losses in curves.items():
    axes.plot(range(1, len(losses) + 1), losses, label=name)
for spike in sorted(monitor.spikes, key=lambda spike: spike.step):
    ids = spike.context
    params = dict(model.named_parameters())
    found = gradclip.explain_spike(loss_of_one, params, batch=(x[ids], y[ids]))
    image, layer = int(ids[found.examples[0].place]), spike.layers[0].name
    norms = f"norm {spike.norm:.0f}, usually {spike.level:.1f}"
    print(f"step {spike.step}: {norms}, most in {layer}, by image {image}")
    told = f"step {spike.step}\nimage {image}\n{layer}\nskipped"
    axes.axvline(spike.step, color="0.7", linestyle=":", zorder=0)
    axes.text(spike.step + 4, 3.95, told, va="top", color="0.35", fontsize=10)
axes.set(xlim=(0, 145), ylim=(0, 4), xlabel="step", title="Loss on test images")
axes.legend(loc="center right", bbox_to_anchor=(1, 0.6))
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "loss_spike.svg")
