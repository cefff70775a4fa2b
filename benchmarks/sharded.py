"""Clip sharded gradients, compared with torch.nn.utils: times, collectives, and which layouts work."""

import argparse
import math
import os
import random
import statistics
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import SHARDED, write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import gradclip
from gradclip._src.backends.torch.process_groups import ROOM
from gradclip._src.core import accumulators
from gradclip._src.core.norms import Order

WORLD = 4
TENSORS, PROCESSES = (10, 500), (2, 4, 8)
WIRE_CALLS = 20
TIMEOUT = int(os.environ.get("TIMEOUT", "10"))  # seconds
FLAGS, MARKS = 4, 4


def spawn(function, world, *arguments):
    """Run `function` in `world` gloo processes, and return the result of each."""
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
    os._exit(0)  # a normal exit would wait for a call that timed out


# Layouts of gradients over four processes, as in real training


class Meshes:
    """Meshes of four processes: one dimension, and 2 x 2."""

    def __init__(self):
        self.line = init_device_mesh("cpu", (WORLD,))
        self.square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.tp = self.square["tp"]


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameter(x, mesh=None, *placements):
    """Return a parameter with the gradient `x`, either whole on each process or sharded over a mesh."""
    settled = [Replicate() if placement.is_partial() else placement for placement in placements]
    whole = x if mesh is None else distribute_tensor(x, mesh, settled)
    p = torch.nn.Parameter(torch.zeros_like(whole))
    p.grad = whole
    if any(placement.is_partial() for placement in placements):
        p = torch.nn.Parameter(distribute_tensor(torch.zeros_like(x), mesh, [Shard(0)]))
        term = whole.to_local() / WORLD
        p.grad = DTensor.from_local(term, mesh, placements, run_check=False)
    return p


def laid(*given, **options):
    """Return parameters with gradients, the whole gradients, and the options of a call."""
    return [parameter(*one) for one in given], [full for full, *_ in given], options


def strided(meshes):
    full = numbers(8, 4)
    dp, tp = meshes.square.get_coordinate()
    local = full.chunk(2)[tp].chunk(2)[dp].clone()
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    p = torch.nn.Parameter(DTensor.from_local(torch.zeros_like(local), meshes.square, placements, run_check=False))
    p.grad = DTensor.from_local(local, meshes.square, placements, run_check=False)
    return [p], [full], {}


def empty_shards(meshes, **options):
    return laid((numbers(8, 4), meshes.line, Shard(0)), (numbers(1, 4, seed=1), meshes.line, Shard(0)), **options)


def stages(meshes):
    full = [numbers(4, seed=seed) for seed in range(WORLD)]
    return [parameter(full[dist.get_rank()])], full, {"process_group": dist.group.WORLD}


def experts(meshes):
    full = [numbers(2, 4), numbers(6, seed=1)]
    mine = [parameter(full[0][meshes.tp.get_local_rank()]), parameter(full[1])]
    return [{"params": mine[:1], "mesh": meshes.tp}, {"params": mine[1:]}], full, {}


def nothing_on_one(meshes):
    parameters, full, _ = laid((numbers(8, 4), meshes.line, Shard(0)), (numbers(8, seed=1), meshes.line, Shard(0)))
    if dist.get_rank() == WORLD - 1:
        parameters[0].grad = parameters[1].grad = None
    return parameters, [x[:6] for x in full], {}


MATRICES = (numbers(8, 4), numbers(6, 4, seed=1))
LAYOUTS = {
    "shards on one mesh": lambda on: laid((MATRICES[0], on.line, Shard(0)), (numbers(6, seed=1), on.line, Shard(0))),
    "shards on 2 x 2": lambda on: laid(*((x, on.square, Shard(0), Shard(1)) for x in MATRICES)),
    "replicated x sharded (HSDP)": lambda on: laid(*((x, on.square, Replicate(), Shard(0)) for x in MATRICES)),
    "strided shards (FSDP x TP)": strided,
    "a shard is empty": empty_shards,
    "a shard is empty, ord inf": lambda on: empty_shards(on, ord=math.inf),
    "a shard is empty, ord -inf": lambda on: empty_shards(on, ord=-math.inf),
    "shards on two meshes": lambda on: laid((MATRICES[0], on.line, Shard(0)), (MATRICES[1], on.tp, Shard(0))),
    "shards and plain tensors": lambda on: laid((MATRICES[0], on.line, Shard(0)), (numbers(6, seed=1),)),
    "shards and a partial gradient": lambda on: laid(
        (MATRICES[0], on.line, Shard(0)), (MATRICES[1], on.line, Partial())
    ),
    "700 bfloat16 tensors": lambda on: laid(*((torch.ones(4).bfloat16(), on.line, Shard(0)) for _ in range(700))),
    "float32 numbers of 1e25": lambda on: laid((1e25 * MATRICES[0], on.line, Shard(0))),
    "pipeline: other layers on each": stages,
    "experts split over a pair": experts,
    "no gradients on one process": nothing_on_one,
}
UNEVEN = ("a shard is empty, ord inf", "a shard is empty, ord -inf", "no gradients on one process")
"""Layouts in which PyTorch may continue on one process while others wait."""

# Times


def timed(tensors, repeats):
    """Return milliseconds, collectives and bytes sent for clipping `tensors` DTensors, by gradclip and by PyTorch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameters = [parameter(torch.randn(64, 16), mesh, Shard(0)) for _ in range(tensors)]
    calls = {"gradclip": gradclip.clip_grad_norm_, "torch": torch.nn.utils.clip_grad_norm_}
    collectives = {name: collectives_of(call, parameters) for name, call in calls.items()}
    sent = {
        name: bytes_of(lambda call=call: call(parameters, 1e9)) - bytes_of(lambda: None) for name, call in calls.items()
    }
    times = {name: [] for name in calls}
    for turn in range(repeats):
        for name in random.Random(turn).sample(list(calls), len(calls)):
            for p in parameters:
                p.grad.to_local().fill_(1.0)
            dist.barrier()
            start = time.perf_counter()
            calls[name](parameters, 1.0)
            times[name].append(time.perf_counter() - start)
    return {name: (1e3 * statistics.median(times[name]), collectives[name], sent[name]) for name in calls}


def collectives_of(call, parameters):
    with CommDebugMode() as counted:
        call(parameters, 1e9)
    return counted.get_total_counts()


def bytes_of(call):
    """Return the bytes that each process sends in a call and a barrier."""
    dist.barrier()
    before = _loopback()
    for _ in range(WIRE_CALLS):
        call()
        dist.barrier()
    return (_loopback() - before) / WIRE_CALLS / dist.get_world_size()


def _loopback():
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def times(repeats, worlds):
    print(f"Clipping small DTensors on one mesh, {repeats} calls each")
    print(
        "processes, tensors, function, median milliseconds, collectives of a call, bytes that a process sends in a call"
    )
    for world, tensors in ((world, tensors) for tensors in TENSORS for world in worlds):
        of_rank = spawn(timed, world, tensors, repeats)
        rows = []
        for name in of_rank[0]:
            ms, collectives, sent = (max(found[name][what] for found in of_rank) for what in range(3))
            row = {"processes": world, "tensors": tensors, "name": name, "ms": ms}
            rows.append(row | {"collectives": collectives, "bytes": round(sent)})
            print(" ".join(f"{value:>12.2f}" if key == "ms" else f"{value:>9}" for key, value in rows[-1].items()))
        yield from rows


# Outcomes


def outcome(clip, parameters, full, options):
    """Return in a few words the outcome of a call that should halve the norm of the gradients."""
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
        time.sleep(1.5 * TIMEOUT)  # else the others would see a process that ended, not one that makes no call
    return found


def layouts():
    print(f"\nOutcome of a call on {WORLD} processes (gradclip | torch); 'hangs' means a timeout after {TIMEOUT} s")
    for names in ([name for name in LAYOUTS if name not in UNEVEN], *([name] for name in UNEVEN)):
        of_ranks = spawn(compared, WORLD, names)
        for name in names:
            ours, torchs = map(_together, zip(*(of_rank[name] for of_rank in of_ranks), strict=True))
            print(f"{name:32} {ours:5} | {torchs}")
            yield {"layout": name, "gradclip": ours, "torch": torchs}


def _together(of_rank):
    kinds = sorted(set(of_rank))
    if len(kinds) > 1 and "hangs" in kinds:
        return f"hangs ({'; '.join(kind for kind in kinds if kind != 'hangs')} on one)"
    return kinds[0] if len(kinds) == 1 else "; ".join(kinds)


def lengths():
    print("\nNumbers in a norm, and bytes of the reductions when all gradients are sharded in the same way")
    for ord in (1, 2, 3, 4, 8, math.inf):
        length = accumulators.length(Order.parse(ord))
        first, rest = 8 * (ROOM + MARKS), 8 * max(0, length + FLAGS - ROOM)
        print(f"ord {ord:<4} {length:3} numbers: {first} bytes" + (f", then {rest}" if rest else ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300, help="the number of calls of each contender")
    parser.add_argument("--out", type=Path, default=SHARDED, help="the file to write")
    options = parser.parse_args()
    rows = list(times(options.repeats, PROCESSES))
    lengths()
    write({"rows": rows, "layouts": list(layouts())}, options.out)


if __name__ == "__main__":
    main()
