"""Clip DTensors by layer: milliseconds and collectives of a call on four processes, functional and in place.

`scripts/with_source.py OTHER_SRC benchmarks/sharded_layers.py` measures another copy of the source: run both in turns.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from sharded import WORLD, collectives_of, parameter, spawn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import gradclip

CALLS = {
    "layer_norms": lambda params: gradclip.layer_norms([p.grad for p in params]),
    "clip_by_layer_norm": lambda params: gradclip.clip_by_layer_norm([p.grad for p in params], 1.0),
    "clip_grad_layer_norm_": lambda params: gradclip.clip_grad_layer_norm_(params, 1.0),
    "clip_grad_unit_norm_": lambda params: gradclip.clip_grad_unit_norm_(params, 1.0),
    "adaptive_grad_clip_": lambda params: gradclip.adaptive_grad_clip_(params),
    "clip_grad_norm_": lambda params: gradclip.clip_grad_norm_(params, 1.0),
}


def measured(tensors, repeats):
    """Return the median milliseconds and the collectives of each call; None if it refuses distributed tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [parameter(torch.randn(64, 16), mesh, Shard(0)) for _ in range(tensors)]
    found = {}
    for name, call in CALLS.items():
        times = []
        try:
            collectives = collectives_of(lambda params, _, call=call: call(params), params)
        except ValueError:
            continue
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            call(params)
            times.append(time.perf_counter() - start)
        found[name] = 1e3 * statistics.median(times), collectives
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    of_ranks = spawn(measured, WORLD, options.tensors, options.repeats)
    for name in CALLS:
        if name in of_ranks[0]:
            ms, collectives = (max(one[name][what] for one in of_ranks) for what in (0, 1))
            print(f"{name:24} {ms:9.2f} ms {collectives:5} collectives")
        else:
            print(f"{name:24} refuses distributed tensors")


if __name__ == "__main__":
    main()
