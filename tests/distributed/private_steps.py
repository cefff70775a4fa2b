"""Steps of Opacus' optimizers with gradclip's sums, each process with its part of the batch."""

import math
import os
import warnings

import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gradclip
from gradclip.integrations.opacus import (
    DistributedDPOptimizer,
    PrivacyEngine,
    SimpleDistributedPerLayerOptimizer,
)
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
SHAPES = [(4, 3), (5,)]


def whole_gradients():
    """Return the gradients of seven examples, of which this process has every WORLD-th."""
    generator = torch.Generator().manual_seed(0)
    every = [torch.randn(7, *shape, generator=generator) for shape in SHAPES]
    return every, [x[dist.get_rank() :: WORLD] for x in every]


def stepped(kind, max_grad_norm, own, **settings):
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    settings = {"noise_multiplier": 0.0, "expected_batch_size": None, "loss_reduction": "sum"} | settings
    optimizer = kind(torch.optim.SGD(parameters, lr=1.0), max_grad_norm=max_grad_norm, **settings)
    for p, sample in zip(parameters, own, strict=True):
        p.grad_sample = sample.clone()
    optimizer.step()
    return optimizer, [p.grad for p in parameters]


def the_same_everywhere(tensors):
    for x in tensors:
        found = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(found, x)
        assert all(torch.equal(x, y) for y in found)


def sums_are_those_of_one_process():
    every, own = whole_gradients()
    for kind, threshold in ((DistributedDPOptimizer, 1.0), (SimpleDistributedPerLayerOptimizer, [0.5, 0.25])):
        _, grads = stepped(kind, threshold, own)
        summed, _ = gradclip.per_example_clip(every, threshold, sum_dtype="float64")
        for x, y in zip(grads, summed, strict=True):
            assert x.dtype == torch.float32
            torch.testing.assert_close(x.double(), y, rtol=2.0**-23, atol=1e-15)
        the_same_everywhere(grads)


def means_are_over_all_processes():
    every, own = whole_gradients()
    _, grads = stepped(DistributedDPOptimizer, 1.0, own, loss_reduction="mean", expected_batch_size=7 / WORLD)
    summed, _ = gradclip.per_example_clip(every, 1.0, sum_dtype="float64")
    for x, y in zip(grads, summed, strict=True):
        torch.testing.assert_close(x.double(), y / 7, rtol=2.0**-22, atol=1e-15)


def noise_is_added_once_and_covers_all_processes():
    _, own = whole_gradients()
    settings = {"noise_multiplier": 2.0, "expected_batch_size": 8}
    generator = torch.Generator().manual_seed(3 + dist.get_rank())
    optimizer, grads = stepped(
        DistributedDPOptimizer, 0.5, [torch.zeros_like(x) for x in own], generator=generator, **settings
    )
    most = 4 * 8 * WORLD + 1024
    promised = gradclip.clipped_sum_sensitivity(
        0.5, batch_size=most, layout=gradclip.SumLayout(partial_sums=most, elements=17), sum_dtype="float64"
    )
    again = torch.Generator().manual_seed(3)
    for x in grads:
        drawn = torch.normal(0.0, promised.noise_std(2.0), x.shape, generator=again, dtype=torch.float64)
        torch.testing.assert_close(x, drawn.float(), rtol=2.0**-23, atol=0.0)
    the_same_everywhere(grads)
    assert optimizer.noise_multiplier == 2.0


def an_empty_part_adds_nothing():
    _, own = whole_gradients()
    mine = own if dist.get_rank() == 0 else [x[:0] for x in own]
    _, grads = stepped(DistributedDPOptimizer, 1.0, mine)
    the_same_everywhere(grads)
    assert math.isfinite(float(grads[0].sum()))
    assert any(x.any() for x in grads)


def an_engine_trains_a_module_of_all_processes():
    torch.manual_seed(0)
    module = DifferentiallyPrivateDistributedDataParallel(torch.nn.Linear(3, 2))
    data = TensorDataset(torch.randn(96, 3), torch.arange(96) % 2)  # Opacus skips a process with no example
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, optimizer, loader = PrivacyEngine().make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=24),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        assert type(optimizer) is DistributedDPOptimizer
        for features, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(features), labels).backward()
            optimizer.step()
    the_same_everywhere([p.detach() for p in optimizer.params])


if __name__ == "__main__":
    run_all(globals())
