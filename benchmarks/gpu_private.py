"""Time private sums on a GPU beside Opacus'; gpu.py starts this, row by row.

Per-example gradients of a small network are clipped and added by `gradclip.per_example_clip` and by Opacus' optimizer;
the floor is one read of them. Clipped gradients of a batch come from `gradclip.clipped_grad` and from Opacus' ghost
clipping; in place of the floor stands the step that is not private.
"""

import random

import opacus.optimizers
import torch
from gpu_clock import Device, medians
from gpu_contenders import with_floor
from gpu_results import PEER
from gpu_worker import Row, answer, options_of
from private_networks import CLASSES, PERCEPTRON
from private_networks_torch import perceptron
from private_torch import ours, plain, with_ghost, without_noise

import gradclip

BATCH = 256
HIDDEN = 128
SUMS, GHOST = "per_example_clip", "clipped_grad, ghost"
PLAN = [
    Row(f"perceptron 784-{HIDDEN}-10, {BATCH} examples", "float32", SUMS, ""),
    Row(f"perceptron {'-'.join(map(str, PERCEPTRON))}, {BATCH} examples", "float32", GHOST, ""),
]


def sums(device, batch):
    """Return contenders that clip and add the same per-example gradients, and the bytes of these."""
    shapes = [tuple(p.shape) for p in perceptron((784, HIDDEN, CLASSES)).parameters()]
    grads = [torch.randn(batch, *shape, device=device) for shape in shapes]
    read = torch.cat([grad.flatten() for grad in grads])
    parameters = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
    optimizer = opacus.optimizers.DPOptimizer(torch.optim.SGD(parameters, 0.1), **without_noise())

    def again():
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad_sample, parameter.summed_grad = grad.view_as(grad), None

    theirs = torch.no_grad()(optimizer.clip_and_accumulate)
    found = with_floor(lambda: gradclip.per_example_clip(grads, 1.0), theirs, read.sum)
    return {**found, PEER: (theirs, again)}, sum(grad.nbytes for grad in grads)


def ghost(device, batch):
    """Return contenders that make the clipped sum of a batch, and no bytes: no gradient is held."""

    def network():
        return perceptron().to(device)

    features = torch.randn(batch, PERCEPTRON[0], device=device)
    labels = torch.randint(CLASSES, (batch,), device=device)
    everyone = torch.ones(batch, dtype=torch.bool, device=device)
    step = ours(network, features, labels, everyone, "ghost")
    return with_floor(step, with_ghost(network(), features, labels), plain(network(), features, labels)), 0


MAKE = {
    SUMS: (sums, "Opacus' DPOptimizer.clip_and_accumulate", "one read of the per-example gradients"),
    GHOST: (ghost, "Opacus' ghost clipping", "the step that is not private"),
}


def prepare(options):
    random.seed(0)
    torch.manual_seed(0)
    device = Device(options.device)

    def measure(row):
        make, peer, floor = MAKE[row.call]
        calls, size = make(device.name, 8 if options.small else BATCH)
        turns, times, errors = medians(device, calls, options.turns)
        found = {"bytes": size, "peer": peer, "floor": floor, "turns": turns, "times": times}
        return {**found, **({"errors": errors} if errors else {})}

    return device, {}, measure


if __name__ == "__main__":
    answer(options_of(__doc__), PLAN, prepare)
