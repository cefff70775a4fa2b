"""One step of PyTorch's ZeroRedundancyOptimizer in several processes, for test_zero.py: each writes a file of JSON.

`python zero_worker.py FOLDER RANK RANKS NAME...` runs the functions with these names.
"""

import json
import sys
from pathlib import Path

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

import gradclip

FOLDER, RANK, RANKS, *NAMES = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
C = 0.5


def step():
    """Return the norm that was seen, and by how much all weights moved: SGD with rate 1 moves by the gradient."""
    torch.manual_seed(0)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 1)))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.SGD, lr=1.0)
    clipping = gradclip.clip_at_step(optimizer, C)
    before = [p.detach().clone() for p in net.parameters()]
    ((net(torch.arange(12.0).reshape(4, 3) + RANK) - 1) ** 2).mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
    optimizer.step()
    moved = [old - new.detach() for old, new in zip(before, net.parameters(), strict=True)]
    return [norm.item(), clipping.norm.item(), torch.nn.utils.get_total_norm(moved).item()]


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo", f"file://{FOLDER}/store", rank=RANK, world_size=RANKS)
    found = {name: globals()[name]() for name in NAMES}
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
