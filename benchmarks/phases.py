"""Where the time of a call goes with many small tensors: a median for each of its steps, per tensor."""

import statistics
import time

import torch
from in_place import parameters_of
from workloads import WORKLOADS

from gradclip.core.decide import Clipping, decide
from gradclip.core.holders import ALONE
from gradclip.core.nonfinite import PROPAGATE
from gradclip.core.norms import Order
from gradclip.core.rules import CLIP
from gradclip.inplace.gradients import Gradients
from gradclip.parameters import ParameterList

SETS = ("1,000 LoRA tensors", "2,000 small tensors")
REPEATS = 200


def steps(parameters, max_norm):
    """Do what `gradclip.clip_grad_norm_` does; yield the name of each step when it is done."""
    gradients = Gradients.of(ParameterList.of(parameters))
    yield "collect .grad"
    backend = gradients.backend(max_norm, otherwise=tuple)
    yield "find the backend: types and devices"
    with backend.precision():
        arrays = gradients.enter(backend)
        yield "describe to the kernels"
        clipping = Clipping(max_norm, Order(2.0), PROPAGATE, CLIP)
        made = decide(backend, arrays, clipping, gradients.names, holders=ALONE)
        yield "read, and decide"
        gradients.scale(backend, arrays, made.arrays, made.coefficient)
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
