"""What private_steps.py measures in PyTorch: the contenders of a network, and their memory."""

from functools import partial

import numpy as np
import opacus
import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.layers.dp_rnn import RNNLinear
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from private_networks import NOISED, OURS, PLAIN, taken
from private_networks_torch import Recurrent
from private_ours import clipped, with_noise
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile


class Call:
    """A function without arguments, and the memory of PyTorch's allocator that it needs."""

    def __init__(self, function):
        self.function = function

    def __call__(self):
        return self.function()

    def needs(self):
        """Return what is known before the first call of the bytes that it needs."""
        return 0

    def memory(self):
        """Return the most bytes in use at a time."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            self.function()
        changes = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes.sort(key=lambda event: event.start_ns())
        return int(max(np.cumsum([event.nbytes() for event in changes])))


def mean_loss(logits, labels):
    return cross_entropy(logits.flatten(0, -2), labels.flatten())


def contenders(network, batch):
    """Return functions that make contenders, by name. They raise an error where a contender does not support it."""
    features, labels = map(torch.as_tensor, batch)
    mask = torch.as_tensor(taken(len(features)))
    examples = features[mask], labels[mask]
    made = {
        PLAIN: lambda: plain(seeded(network), features, labels),
        **{name: partial(ours, network, features, labels, mask, method) for name, method in OURS.items()},
        NOISED: lambda: with_noise(ours(network, features, labels, mask, "auto"), len(features)),
        "Opacus hooks": lambda: with_hooks(for_opacus(network), *examples),
        "Opacus ghost": lambda: with_ghost(for_opacus(network), *examples),
    }
    return {name: lambda make=make: Call(make()) for name, make in made.items()}


def seeded(network):
    torch.manual_seed(0)
    return network()


def for_opacus(network):
    """Return the network with the dense layers that Opacus has for many uses of one weight."""
    return seeded(partial(Recurrent, RNNLinear) if network is Recurrent else network)


def plain(model, features, labels):
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(mean_loss(model(features), labels), parameters)


def ours(network, features, labels, mask, method, **settings):
    model = seeded(network)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, features, labels):
        return mean_loss(functional_call(model, parameters, (features,)), labels)

    made = clipped(loss, len(features), method, **settings)
    return lambda: made(parameters, features, labels, mask=mask)


def with_hooks(model, features, labels):
    wrapped = opacus.GradSampleModule(model)
    optimizer = DPOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.0), **without_noise())

    def gradient():
        mean_loss(wrapped(features), labels).backward()
        optimizer.clip_and_accumulate()
        sums = [p.summed_grad for p in optimizer.params]
        optimizer.zero_grad()
        return sums

    return gradient


def with_ghost(model, features, labels):
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0)
    optimizer = DPOptimizerFastGradientClipping(torch.optim.SGD(wrapped.parameters(), lr=0.0), **without_noise())
    loss = DPLossFastGradientClipping(wrapped, optimizer, torch.nn.CrossEntropyLoss())

    def gradient():
        optimizer.zero_grad()
        logits = wrapped(features)
        shape = logits.shape if labels.ndim > 1 else None
        loss(logits.flatten(0, -2), labels.flatten(), shape=shape).backward()
        return [p.grad for p in optimizer.params]

    return gradient


def without_noise():
    return {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "expected_batch_size": 1}
