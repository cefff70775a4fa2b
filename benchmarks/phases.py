"""Time each step of a call on many small tensors: medians per tensor."""

import statistics
import time

import torch
from in_place import parameters_of
from workloads import WORKLOADS

from gradclip.backends.registry import framework_of
from gradclip.core.coefficient import KEPT, of_number
from gradclip.core.norms import EUCLIDEAN
from gradclip.ordinary import Ordinary

SETS = ("1,000 LoRA tensors", "2,000 small tensors")
REPEATS = 200


def steps(parameters, max_norm):
    """Do what `gradclip.clip_grad_norm_` does. Yield the name of each step after it."""
    framework = framework_of(parameters[0])
    gradients = framework.gradients_of(parameters)
    yield "collect .grad"
    backend = framework.on_fast_path(gradients)
    yield "look at types and devices"
    known = backend.known(gradients)
    yield "describe to the kernels"
    assert not known.overlap()
    yield "see that no two share memory"
    norm, error, _ = Ordinary(backend, known, gradients).measured(EUCLIDEAN)
    factors = of_number(norm, error, max_norm)
    yield "read, and decide"
    if factors is not KEPT:
        known.scale(known, *factors, backend.threads())
        backend.wrote(gradients)
    yield "scale"


def medians_of(parameters, threshold_of):
    taken = {}
    for repeat in range(REPEATS):
        last = time.perf_counter()
        for name in steps(parameters, threshold_of(repeat)):
            now = time.perf_counter()
            taken.setdefault(name, []).append(now - last)
            last = now
    return {name: statistics.median(times) for name, times in taken.items()}


def main():
    torch.manual_seed(0)
    for workload in SETS:
        parameters = parameters_of(WORKLOADS[workload], torch.float32)
        for case, threshold_of in {
            "not clipped": lambda _: 1e9,
            "clipped": lambda repeat: 100.0 * 0.99**repeat,
        }.items():
            found = medians_of(parameters, threshold_of)
            print(f"{workload}, {case}: {1e3 * sum(found.values()):.2f} ms")
            for name, seconds in found.items():
                print(f"  {1e9 * seconds / len(parameters):7.0f} ns each   {name}")


if __name__ == "__main__":
    main()
