"""Clipping gradients that several processes hold, beside torch.nn.utils: times, collectives, and which layouts work."""

import math
import os
import random
import statistics
import tempfile
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sharded_layouts import LAYOUTS, UNEVEN, WORLD, Meshes, parameter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

import gradclip
from gradclip import shards
from gradclip.norms import Order

TENSORS, REPEATS, PROCESSES = 500, 100, (2, 4, 8)
TIMEOUT = 10


def spawn(function, world, *arguments):
    """Run `function` in `world` processes of gloo, and return what each returned."""
    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_join, (function, world, folder, queue, arguments), nprocs=world)
        found = dict(queue.get() for _ in range(world))
    return [found[rank] for rank in range(world)]


def _join(rank, function, world, folder, queue, arguments):
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world, timeout=timeout)
    queue.put((rank, function(*arguments)))
    os._exit(0)  # leaving a group in which a call has timed out would wait for it


# Times


def timed(tensors):
    """Return the median milliseconds of clipping so many DTensors, ours and PyTorch's in turns, and collectives."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameters = [parameter(torch.randn(64, 16), mesh, Shard(0)) for _ in range(tensors)]
    calls = {"gradclip": gradclip.clip_grad_norm_, "torch": torch.nn.utils.clip_grad_norm_}
    times = {name: [] for name in calls}
    collectives = {}
    for name, call in calls.items():
        with CommDebugMode() as counted:
            call(parameters, 1e9)
        collectives[name] = counted.get_total_counts()
    for turn in range(REPEATS):
        for name in random.Random(turn).sample(list(calls), len(calls)):
            for p in parameters:
                p.grad.to_local().fill_(1.0)
            dist.barrier()
            start = time.perf_counter()
            calls[name](parameters, 1.0)
            times[name].append(time.perf_counter() - start)
    return {name: (1e3 * statistics.median(taken), collectives[name]) for name, taken in times.items()}


def print_times():
    print(f"Clipping small DTensors on one mesh: median milliseconds of {REPEATS} calls (collectives)")
    print(f"{'processes':>9} {'tensors':>7} {'gradclip':>14} {'torch':>14} {'ratio':>6}")
    for world, tensors in [(2, 10), *((world, TENSORS) for world in PROCESSES)]:
        of_rank = spawn(timed, world, tensors)
        slowest = {name: max(found[name] for found in of_rank) for name in of_rank[0]}
        row = [f"{time:.2f} ({count})" for time, count in slowest.values()]
        ratio = slowest["torch"][0] / slowest["gradclip"][0]
        print(f"{world:>9} {tensors:>7} {row[0]:>14} {row[1]:>14} {ratio:>5.1f}x")


# Layouts


def outcome(clip, parameters, full, options):
    """Return in a few words what becomes of a call that should clip the gradients to half of their norm."""
    ord = options.get("ord", 2)
    expected = torch.linalg.vector_norm(torch.cat([x.double().flatten() for x in full]), ord).item()
    flat = [p for p in parameters if not isinstance(p, dict)] or [p for group in parameters for p in group["params"]]
    before = [None if p.grad is None else _local(p.grad).clone() for p in flat]
    try:
        norm = clip(parameters if clip is ours else flat, expected / 2, options)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    except Exception as error:
        return "hangs" if "imed out" in str(error) or "imeout" in str(error) else f"raises {type(error).__name__}"
    if not math.isclose(norm.item(), expected, rel_tol=1e-5):
        return f"wrong: {norm.item():.4g}, not {expected:.4g}"
    halved = [_halved(x, p.grad) for x, p in zip(before, flat, strict=True)]
    return "right" if all(halved) else "wrong gradients"


def _local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def _halved(before, grad):
    if before is None or (isinstance(grad, DTensor) and len(before) != len(_local(grad))):
        return True
    return torch.allclose(_local(grad).double(), before.double() / 2, rtol=0.01, atol=1e-30)


def ours(parameters, max_norm, options):
    return gradclip.clip_grad_norm_(parameters, max_norm, **options)


def torchs(parameters, max_norm, options):
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, options.get("ord", 2))


def compared(names):
    meshes = Meshes()
    found = {name: [outcome(clip, *LAYOUTS[name](meshes)) for clip in (ours, torchs)] for name in names}
    if names[0] in UNEVEN and found[names[0]][1] != "hangs":
        time.sleep(1.5 * TIMEOUT)  # the others would otherwise see a process that has ended, not one that does not call
    return found


def print_layouts():
    print(f"\nWhat becomes of a call on {WORLD} processes (gradclip | torch); hangs: until a timeout of {TIMEOUT} s")
    for names in ([name for name in LAYOUTS if name not in UNEVEN], *([name] for name in UNEVEN)):
        of_ranks = spawn(compared, WORLD, names)
        for name in names:
            found = zip(*(of_rank[name] for of_rank in of_ranks), strict=True)
            print(f"{name:32} {' | '.join(f'{_together(kinds):5}' for kinds in found)}")


def _together(of_rank):
    kinds = sorted(set(of_rank))
    if len(kinds) > 1 and "hangs" in kinds:
        return f"hangs ({'; '.join(kind for kind in kinds if kind != 'hangs')} on one)"
    return kinds[0] if len(kinds) == 1 else "; ".join(kinds)


# Sizes


def print_sizes():
    print("\nNumbers in a vector, and bytes that one reduction carries when all gradients are split alike")
    for ord in (1, 2, 3, math.inf):
        order = Order.parse(ord)
        length = shards.length(order)
        print(f"ord {ord:<4} {length:3} numbers and 3 flags: {8 * (length + 3)} bytes")


if __name__ == "__main__":
    print_times()
    print_layouts()
    print_sizes()
