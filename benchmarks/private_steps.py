"""Measure time and memory of the clipped sum of per-example gradients, without noise, compared with other libraries.

As in Poisson sampling, a tenth of the places of a batch are empty. Each contender that supports a padding mask gets
one, and the batch as a whole; Opacus gets the examples alone. gradclip's settings are those whose sensitivity to adding
or removing one example is finite: `pad_to` or microbatches. Memory is the most memory in use at a
time, without the inputs: in JAX the temporary buffers of the compiled program, in PyTorch the allocator's memory.
Memory that gradclip's kernels allocate, a float64 copy of the parameters per thread, is not counted. Neither are
gradclip's sums in PyTorch, in float64 and in the returned dtype, which are in NumPy's memory.
"""

import random

import jax
import jax_privacy.clipping
import numpy as np
import opacus
import optax
import private_networks as networks
import torch
from report import PRIVATE_STEPS, parser, rows, show, write_measured
from timing import medians
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

import gradclip
import gradclip.integrations.jax_privacy

MICROBATCH = 32
BATCHES = (64, 128, 256)
JAX_NETWORKS = {
    "perceptron 784-512-256-10": (networks.perceptron, 256),
    "convolutional network": (networks.convolution, 128),
    "transformer of 2 layers": (networks.transformer, 64),
}
TORCH_NETWORKS = {
    "perceptron 784-512-256-10": (networks.torch_perceptron, 256),
    "convolutional network": (networks.torch_convolution, 128),
}


def private(clipped, size):
    """Return a clipped function. Raise a ValueError if one example can move its sum without limit."""
    clipped.sensitivity(batch_size=size).noise_std(noise_multiplier=1.0)
    return clipped


def jax_contenders(loss, size, microbatch):
    """Return contenders as functions of parameters, features, labels and a mask."""
    settings = {"batch_argnums": (1, 2), "microbatch_size": microbatch}
    ours = private(gradclip.clipped_grad(loss, 1.0, pad_to=size, **settings), size)
    named = gradclip.integrations.jax_privacy.clipped_grad(loss, l2_clip_norm=1.0, **settings)
    theirs = jax_privacy.clipping.clipped_grad(loss, l2_clip_norm=1.0, **settings)
    found = {
        "gradclip.clipped_grad": lambda p, x, y, mask: ours(p, x, y, mask=mask),
        "gradclip (jax_privacy name)": lambda p, x, y, mask: named(p, x, y, is_padding_example=~mask),
        "jax_privacy.clipping.clipped_grad": lambda p, x, y, mask: theirs(p, x, y, is_padding_example=~mask),
    }
    if microbatch:
        return found

    def of_example(p, x, y):
        return jax.grad(loss)(p, x[None], y[None])

    def with_optax(p, x, y, mask):
        grads = jax.vmap(of_example, in_axes=(None, 0, 0))(p, x, y)
        return optax.per_example_global_norm_clip(grads, 1.0)[0]

    return found | {"jax.vmap and optax": with_optax, "not private": lambda p, x, y, mask: jax.grad(loss)(p, x, y)}


def taken(size):
    """Return a mask of the places of a batch that hold examples."""
    return np.random.default_rng(0).permutation(size) < size - size // 10


def compiled(network, size, microbatch):
    """Return the compiled contenders and their arguments."""
    mask = taken(size)
    arguments = network.params, *jax.device_put((*network.batch(size), mask))
    functions = jax_contenders(network.loss, size, microbatch)
    return {name: jax.jit(f).lower(*arguments).compile() for name, f in functions.items()}, arguments


def temporary(program):
    return program.memory_analysis().temp_size_in_bytes


def measured_in_jax(network, size, microbatch, options):
    """Return the rows of one network, with all examples at once or in microbatches."""
    programs, arguments = compiled(network, size, microbatch)
    calls = {name: lambda run=run: jax.block_until_ready(run(*arguments)) for name, run in programs.items()}
    times = medians(calls, options.repeats, options.seconds)
    case = f"JAX, {microbatch} a time" if microbatch else "JAX"
    found = rows({"batch": size, "case": case}, times)
    return [{**row, "bytes": temporary(programs[row["name"]])} for row in found]


def growth(network, microbatch):
    """Return the temporary bytes of each contender for several batch sizes."""
    programs = {size: compiled(network, size, microbatch)[0] for size in BATCHES}
    return {name: {size: temporary(programs[size][name]) for size in BATCHES} for name in programs[BATCHES[0]]}


def torch_contenders(make, size):
    torch.manual_seed(0)
    model, shape = make()
    features, labels = torch.randn(size, *shape), torch.randint(networks.CLASSES, (size,))
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, features, labels):
        return cross_entropy(functional_call(model, parameters, (features,)), labels)

    ours, in_parts = (
        private(gradclip.clipped_grad(loss, 1.0, batch_argnums=(1, 2), **settings), size)
        for settings in ({"pad_to": size}, {"microbatch_size": MICROBATCH})
    )
    mask = torch.as_tensor(taken(size))
    return {
        "gradclip.clipped_grad": lambda: ours(parameters, features, labels, mask=mask),
        f"gradclip, {MICROBATCH} a time": lambda: in_parts(parameters, features, labels, mask=mask),
        "Opacus": opacus_gradient(make()[0], features[mask], labels[mask]),
        "not private": lambda: torch.autograd.grad(cross_entropy(model(features), labels), list(model.parameters())),
    }


def opacus_gradient(model, features, labels):
    wrapped = opacus.GradSampleModule(model)
    optimizer = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=0.0), noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=1
    )

    def gradient():
        cross_entropy(wrapped(features), labels).backward()
        optimizer.clip_and_accumulate()
        sums = [p.summed_grad for p in optimizer.params]
        optimizer.zero_grad()
        return sums

    return gradient


def peak(call):
    """Return the peak number of bytes that PyTorch's allocator has in use during a call."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    changes = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(np.cumsum([event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())]).tolist())


def measured_in_torch(make, size, options):
    calls = torch_contenders(make, size)
    times = medians(calls, options.repeats, options.seconds)
    return [{**row, "bytes": peak(calls[row["name"]])} for row in rows({"batch": size, "case": "PyTorch"}, times)]


def show_all(workload, found):
    show(workload, found)
    print("  MiB: " + ", ".join(f"{row['name']} {row['bytes'] / 2**20:.1f}" for row in found), flush=True)


def show_growth(found):
    print(f"  MiB for batches of {', '.join(map(str, BATCHES))}:")
    for name, sizes in found.items():
        print(f"    {name:<34}" + "".join(f"{size / 2**20:9.1f}" for size in sizes.values()), flush=True)


def main():
    options = parser(__doc__, PRIVATE_STEPS, "the first network only").parse_args()
    random.seed(0)
    found, grown = [], []
    few = 1 if options.quick else None
    for workload, (make, size) in list(JAX_NETWORKS.items())[:few]:
        network = make()
        for microbatch in (None, MICROBATCH):
            here = measured_in_jax(network, size, microbatch, options)
            show_all(workload, here)
            found += [{"workload": workload, **row} for row in here]
            grown.append({"workload": workload, "microbatch": microbatch, "bytes": growth(network, microbatch)})
            show_growth(grown[-1]["bytes"])
    for workload, (make, size) in list(TORCH_NETWORKS.items())[:few]:
        here = measured_in_torch(make, size, options)
        show_all(workload, here)
        found += [{"workload": workload, **row} for row in here]
    described = {"threads": torch.get_num_threads(), "repeats": options.repeats}
    write_measured({**described, "rows": found, "growth": grown}, options)


if __name__ == "__main__":
    main()
