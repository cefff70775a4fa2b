"""One of four processes is killed within a call, before the reduction whose number is the argument."""

import json
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import gradclip
from gradclip._src.distributed import process_groups
from gradients import numbers, on_one_process, parameter
from worker import joined


def die_before(number):
    reduce = process_groups.reduce
    left = iter(range(number - 1))

    def reduce_or_die(*args, **kwargs):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return reduce(*args, **kwargs)

    process_groups.reduce = reduce_or_die


def state(gradients, before, clipped):
    """Return whether all gradients are as they were, all are clipped, or neither."""
    if all(torch.equal(x, y) for x, y in zip(gradients, before, strict=True)):
        return "as before"
    done = [torch.allclose(x, y, rtol=1e-6, atol=0) for x, y in zip(gradients, clipped, strict=True)]
    return "clipped" if all(done) else "half"


def main():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = [numbers(8, 4, seed=seed) for seed in range(3)]
    placements = [Shard(0), Shard(1)]
    parameters = [parameter(x, mesh, placements) for x in full]
    _, clipped = on_one_process(full, 1.0)
    clipped = [parameter(x, mesh, placements).grad.to_local() for x in clipped]
    before = [p.grad.to_local().clone() for p in parameters]
    dist.barrier()
    if dist.get_rank() == 1:
        die_before(int(sys.argv[1]))
    error = None
    try:
        gradclip.clip_grad_norm_(parameters, 1.0)
    except RuntimeError as raised:
        error = str(raised)
    left = state([p.grad.to_local() for p in parameters], before, clipped)
    print(json.dumps({"error": error, "state": left}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    with joined():
        main()
