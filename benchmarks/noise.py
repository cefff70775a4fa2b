"""Measure the noise of a private sum: exact, on one processor and on two, by OpenDP, and by a framework's generator.

For each number of elements: the least processor time and the least time by the clock of a few calls, in turns. On a
busy machine only the processor time says something.
"""

import argparse
import platform
import time
from importlib import metadata

import numpy as np
import torch
from report import NOISE, write

import gradclip
from gradclip._src.private.noise import discrete

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
MOST_OF_OPENDP = 1_000_000
GRID = 2**30


def contenders(elements):
    """Return calls that add noise to a sum of so many elements."""
    on_grid = gradclip.clipped_sum_sensitivity(1.0, batch_size=256, grid=GRID)
    floats = gradclip.clipped_sum_sensitivity(1.0, batch_size=256)
    integers, array, tensor = np.zeros(elements, np.int64), np.zeros(elements, np.float32), torch.zeros(elements)
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)

    def exact(summed, sensitivity, processors, rng="system"):
        def call():
            discrete.processors = lambda: processors
            gradclip.add_noise(summed, sensitivity, noise_multiplier=1.0, rng=rng)

        return call

    calls = {
        "exact, integers, one processor": exact(integers, on_grid, 1),
        "exact, integers, two processors": exact(integers, on_grid, 2),
        "exact, float32, one processor": exact(array, floats, 1),
        "exact, all bits of the system, one processor": exact(integers, on_grid, 1, "urandom"),
        "OpenDP, integers, one processor": exact(integers, on_grid, 1, "opendp"),
        "OpenDP, integers, two processors": exact(integers, on_grid, 2, "opendp"),
        "NumPy's generator": lambda: gradclip.add_noise(array, floats, noise_multiplier=1.0, rng=rng),
        "PyTorch's generator": lambda: gradclip.add_noise(tensor, floats, noise_multiplier=1.0, rng=generator),
    }
    if elements > MOST_OF_OPENDP:
        calls = {name: call for name, call in calls.items() if "OpenDP" not in name}
    return calls


def measured(elements, repeats):
    """Return a row for each contender."""
    calls, found = contenders(elements), {}
    for _ in range(repeats):
        for name, call in calls.items():
            wall, processor = time.perf_counter(), time.process_time()
            call()
            spent = time.perf_counter() - wall, time.process_time() - processor
            found[name] = tuple(map(min, found.get(name, spent), spent))
    return [
        {"elements": elements, "name": name, "seconds": wall, "processor seconds": processor}
        for name, (wall, processor) in found.items()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smallest sum only")
    parser.add_argument("--write", action="store_true", help=f"write results/{NOISE.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    contenders(10)["OpenDP, integers, one processor"]()  # imports it
    rows = []
    for elements in SIZES[:1] if options.quick else SIZES:
        found = measured(elements, 1 if elements > 500_000 else 3)
        rows += found
        for row in found:
            times = f"{row['seconds']:9.4f} s by the clock {row['processor seconds']:9.4f} s of processors"
            print(f"{elements:>10,} {row['name']:<32}{times}", flush=True)
    if options.write:
        machine = {"python": platform.python_version(), "opendp": metadata.version("opendp")}
        write({"machine": machine, "rows": rows}, NOISE)


if __name__ == "__main__":
    main()
