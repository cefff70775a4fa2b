"""One step of PyTorch's ZeroRedundancyOptimizer in several processes, for test_zero.py: each writes a file of JSON."""

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

import gradclip
import worker

C = 0.5


def step():
    """Return the norm that was seen, and by how much all weights moved: SGD with rate 1 moves by the gradient."""
    torch.manual_seed(0)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 1)))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.SGD, lr=1.0)
    clipping = gradclip.clip_at_step(optimizer, C)
    before = [p.detach().clone() for p in net.parameters()]
    ((net(torch.arange(12.0).reshape(4, 3) + worker.RANK) - 1) ** 2).mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
    optimizer.step()
    moved = [old - new.detach() for old, new in zip(before, net.parameters(), strict=True)]
    return [norm.item(), clipping.norm.item(), torch.nn.utils.get_total_norm(moved).item()]


if __name__ == "__main__":
    worker.run(globals())
