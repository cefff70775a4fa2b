"""`gradclip.clipped_grad` on PyTorch modules beside Opacus' optimizers, on the same modules, without noise.

Opacus divides by a norm plus 1e-6. What that takes from each example follows from its own gradients, and is added
back before results are compared: no tolerance makes room for it.
"""

import copy
import math

import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn

import gradclip

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")

BATCH, CLASSES, WORDS = 7, 3, 11
# Opacus adds it to each norm.
EPSILON = 1e-6


class Attention(nn.Module):
    """A transformer's block: an embedding, two heads of attention, a feed-forward layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.projections, self.output = nn.Linear(8, 24), nn.Linear(8, 8)
        self.feed_forward = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens):
        x = self.embedding(tokens)
        projected = self.projections(self.norms[0](x)).unflatten(-1, (3, 2, 4))
        queries, keys, values = projected.permute(2, 0, 3, 1, 4)
        weights = torch.softmax(queries @ keys.transpose(-1, -2) / 2.0, dim=-1)
        x = x + self.output((weights @ values).transpose(1, 2).flatten(2))
        x = x + self.feed_forward(self.norms[1](x))
        return self.head(x.mean(1))


def convolutions():
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2)]
    return nn.Sequential(*layers, nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, CLASSES))


def perceptron():
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, CLASSES))


MODELS = {
    "perceptron": (perceptron, lambda: torch.randn(BATCH, 5)),
    "convolutions": (convolutions, lambda: torch.randn(BATCH, 2, 6, 6)),
    "attention": (Attention, lambda: torch.randint(0, WORDS, (BATCH, 6))),
}
every_model = pytest.mark.parametrize("name", MODELS)


def problem(name, dtype=torch.float64):
    """Return a model, a batch and its labels: the same numbers for every dtype."""
    torch.manual_seed(0)
    make_model, make_features = MODELS[name]
    model, features = make_model().to(dtype), make_features()
    return model, features.to(dtype) if features.is_floating_point() else features, torch.arange(BATCH) % CLASSES


def cross_entropy(logits, labels):
    return nn.functional.cross_entropy(logits, labels, reduction="sum")


def ours(model, max_norm, **settings):
    """Return `clipped_grad` of the model's loss, a function of features and labels."""
    parameters = dict(model.named_parameters())

    def loss(parameters, features, labels):
        return cross_entropy(torch.func.functional_call(model, parameters, (features,)), labels)

    clipped = gradclip.clipped_grad(loss, max_norm, batch_argnums=(1, 2), **settings)
    return lambda features, labels, **kwargs: clipped(parameters, features, labels, **kwargs)


def backward(wrapper, model, features, labels, **settings):
    """Return a copy of the model after Opacus' backward pass."""
    wrapped = wrapper(copy.deepcopy(model), loss_reduction="sum", **settings)
    cross_entropy(wrapped(features), labels).backward()
    return wrapped


def optimizer_of(parameters, max_norm):
    kind = DPPerLayerOptimizer if isinstance(max_norm, list) else DPOptimizer
    plain = torch.optim.SGD(parameters, lr=1.0)
    return kind(plain, noise_multiplier=0.0, max_grad_norm=max_norm, expected_batch_size=1)


def opacus(model, max_norm, features, labels):
    """Return Opacus' clipped sums and its gradients of each example, by parameter."""
    wrapped = backward(GradSampleModule, model, features, labels)
    optimizer_of(wrapped.parameters(), max_norm).clip_and_accumulate()
    named = dict(wrapped._module.named_parameters())
    return {k: p.summed_grad for k, p in named.items()}, {k: p.grad_sample for k, p in named.items()}


def layer_norms(samples):
    return {layer: g.flatten(1).double().norm(dim=1) for layer, g in samples.items()}


def global_norms(samples):
    return torch.stack(list(layer_norms(samples).values())).norm(dim=0)


def without_epsilon(summed, samples, thresholds, norms):
    """Return Opacus' sums, and with them what its epsilon took from each example."""

    def taken(name):
        threshold, norm = thresholds[name], norms[name]
        lost = (threshold / norm).clamp(max=1.0) - (threshold / (norm + EPSILON)).clamp(max=1.0)
        return torch.einsum("i,i...", lost, samples[name].double())

    return {name: total.double() + taken(name) for name, total in summed.items()}


def opacus_without_epsilon(model, max_norm, features, labels):
    summed, samples = opacus(model, max_norm, features, labels)
    if isinstance(max_norm, list):
        thresholds, norms = dict(zip(summed, max_norm, strict=True)), layer_norms(samples)
    else:
        thresholds, norms = dict.fromkeys(summed, max_norm), dict.fromkeys(summed, global_norms(samples))
    return without_epsilon(summed, samples, thresholds, norms)


def close(actual, expected, atol=1e-10):
    assert list(actual) == list(expected)
    for name in actual:
        torch.testing.assert_close(actual[name].double(), expected[name].double(), rtol=0.0, atol=atol)


def median_norm(model, features, labels):
    """Return a threshold just above the median, so that three of seven examples exceed it."""
    return 1.001 * float(ours(model, 1.0, return_norms=True)(features, labels)[1].norms.median())


@every_model
def test_norms_equal_those_of_ghost_clipping(name):
    model, *batch = problem(name)
    wrapped = backward(GradSampleModuleFastGradientClipping, model, *batch, max_grad_norm=1.0)
    norms = ours(model, 1.0, return_norms=True)(*batch)[1].norms
    torch.testing.assert_close(norms, wrapped.get_norm_sample(), rtol=1e-10, atol=0.0)


@every_model
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_sums_equal_those_of_the_optimizer(name, microbatch_size):
    model, *batch = problem(name)
    max_norm = median_norm(model, *batch)
    for threshold in (max_norm, 0.01 * max_norm, 100.0 * max_norm):
        clipped = ours(model, threshold, microbatch_size=microbatch_size)
        close(clipped(*batch), opacus_without_epsilon(model, threshold, *batch))


@every_model
def test_the_epsilon_is_seen(name):
    model, *batch = problem(name)
    max_norm = median_norm(model, *batch)
    with pytest.raises(AssertionError, match="not close"):
        close(ours(model, max_norm)(*batch), opacus(model, max_norm, *batch)[0])


@every_model
def test_layers_equal_those_of_the_optimizer(name):
    model, *batch = problem(name)
    names = [name for name, _ in model.named_parameters()]
    max_norm = median_norm(model, *batch)
    uniform = [max_norm / math.sqrt(len(names))] * len(names)
    close(ours(model, max_norm, per_layer=True)(*batch), opacus_without_epsilon(model, uniform, *batch))
    different = [max_norm / (1 + k) for k in range(len(names))]
    chosen = ours(model, dict(zip(names, different, strict=True)))(*batch)
    close(chosen, opacus_without_epsilon(model, different, *batch))


@every_model
@pytest.mark.parametrize("per_layer", [False, True])
def test_float32_is_within_a_unit_in_the_last_place_of_the_largest_sum(name, per_layer):
    """A sum of BATCH examples is at most BATCH * max_norm."""
    model, *batch = problem(name, torch.float32)
    layers = len(list(model.parameters()))
    max_norm = median_norm(model, *batch)
    theirs = [max_norm / math.sqrt(layers)] * layers if per_layer else max_norm
    summed = ours(model, max_norm, per_layer=per_layer)(*batch)
    assert {x.dtype for x in summed.values()} == {torch.float32}
    close(summed, opacus_without_epsilon(model, theirs, *batch), atol=BATCH * max_norm * 2.0**-23)


@every_model
def test_poisson_batches_padded_and_empty(name):
    model, features, labels = problem(name)
    max_norm = median_norm(model, features, labels)
    clipped = ours(model, max_norm)
    generator = torch.Generator().manual_seed(0)
    sampler = UniformWithReplacementSampler(num_samples=BATCH, sample_rate=0.2, generator=generator, steps=8)
    batches = list(sampler)
    assert {0, 1} < set(map(len, batches))
    for rows in batches:
        expected = opacus_without_epsilon(model, max_norm, features[rows], labels[rows])
        close(clipped(features[rows], labels[rows]), expected)
        padding = [0] * (BATCH - len(rows))
        mask = torch.arange(BATCH) < len(rows)
        close(clipped(features[rows + padding], labels[rows + padding], mask=mask), expected)


@every_model
def test_microbatches_equal_physical_batches(name):
    model, features, labels = problem(name)
    max_norm = median_norm(model, features, labels)
    wrapped = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    optimizer = optimizer_of(wrapped.parameters(), max_norm)
    for rows in (slice(0, 4), slice(4, BATCH)):
        optimizer.zero_grad()
        optimizer.signal_skip_step()
        cross_entropy(wrapped(features[rows]), labels[rows]).backward()
        optimizer.step()
    named = dict(wrapped._module.named_parameters())
    _, samples = opacus(model, max_norm, features, labels)
    norms = dict.fromkeys(named, global_norms(samples))
    summed = {name: p.summed_grad for name, p in named.items()}
    expected = without_epsilon(summed, samples, dict.fromkeys(named, max_norm), norms)
    close(ours(model, max_norm, microbatch_size=4)(features, labels), expected)


# One rounding to float32; and twice the error of a norm in float64, by which factors may be too low.
ERRORS = {torch.float32: 2.0**-24 + 2e-14, torch.float64: 2e-14}


@every_model
@pytest.mark.parametrize("dtype", ERRORS)
def test_gradients_of_each_example_as_opacus_has_them(name, dtype):
    model, *batch = problem(name, dtype)
    max_norm = median_norm(model, *batch)
    _, samples = opacus(model, max_norm, *batch)
    summed, info = gradclip.per_example_clip(samples, max_norm)
    assert int(info.num_clipped) == BATCH // 2
    rows = {layer: g.double().numpy() for layer, g in samples.items()}
    expected, magnitudes = dict.fromkeys(rows, 0.0), dict.fromkeys(rows, 0.0)
    for i in range(BATCH):
        factor = min(1.0, max_norm / math.sqrt(sum(np.sum(g[i] ** 2) for g in rows.values())))
        for layer, g in rows.items():
            expected[layer] = expected[layer] + factor * g[i]
            magnitudes[layer] = magnitudes[layer] + np.abs(factor * g[i])
    for layer, total in summed.items():
        assert total.dtype == dtype
        assert np.all(np.abs(total.double().numpy() - expected[layer]) <= ERRORS[dtype] * magnitudes[layer])
