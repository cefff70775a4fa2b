"""Train with DistributedDataParallel, mixed precision and gradient accumulation, and clip at the right place.

Start it with: torchrun --nproc-per-node 2 examples/torch_ddp_amp.py

On GPUs, use the backend "nccl" and the device of the local rank. The order of the calls does not change.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradclip

MAX_NORM = 1.0
STEPS = 60
ACCUMULATE = 4  # micro-batches per step
BROKEN = 30  # the step in which one process gets a NaN


def micro_batch(generator, broken):
    """Return what a data loader would: 32 examples, different on each process."""
    inputs = torch.randn(32, 8, generator=generator)
    targets = inputs[:, :2].sum(dim=1, keepdim=True) + 0.5
    if broken:
        inputs[0, 0] = torch.nan
    return inputs, targets


def log(step, numbers):
    """Log like a real logger: takes the step number and a dict of floats."""
    if step in (1, 2, BROKEN, STEPS):
        print(f"step {step:2d}: norm {numbers['norm']:.2f}, clipped {numbers['clipped']:.0f}")


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), "cpu"
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Only float16 needs a scaler. With bfloat16, leave it out and step as shown in 4.
    scaler = torch.amp.GradScaler(device, init_scale=2.0**16)
    # The first process logs. The monitor waits for a GPU only once every `fetch_every` steps.
    monitor = gradclip.Monitor(callback=log if rank == 0 else None, fetch_every=20)
    generator = torch.Generator().manual_seed(rank)

    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        total = 0.0
        for number in range(ACCUMULATE):
            inputs, targets = micro_batch(generator, broken=(step, number, rank) == (BROKEN, 0, 1))
            # 1. Processes exchange gradients once per step, with the last micro-batch.
            with nullcontext() if number == ACCUMULATE - 1 else model.no_sync():
                with torch.amp.autocast(device, dtype=torch.float16):
                    loss = torch.nn.functional.mse_loss(model(inputs), targets)
                # 2. Divide, so that the threshold does not depend on ACCUMULATE.
                scaler.scale(loss / ACCUMULATE).backward()
            total += loss.detach() / ACCUMULATE
        # 3. Clip once per step, after the last backward() and after unscale_(), which undoes the scale.
        #    All processes now hold the same gradients, so pass no process_group.
        scaler.unscale_(optimizer)
        norm = gradclip.clip_grad_norm_(model.parameters(), MAX_NORM, monitor=monitor)
        # 4. scaler.step() skips the optimizer if unscale_() found NaN or infinities, and update() halves the scale.
        #    Without a scaler, write `if norm.isfinite(): optimizer.step()`. Zero gradients are not enough: AdamW's
        #    momentum and weight decay still move the parameters.
        scaler.step(optimizer)
        scaler.update()
        if rank == 0 and step in (1, STEPS):
            print(f"step {step:2d}: loss {total:.3f}")

    agreed = [torch.zeros_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(agreed, norm)
    if rank == 0:
        print(f"{monitor}; the scale is {scaler.get_scale():g}")
        finite = all(parameter.isfinite().all() for parameter in model.parameters())
        print(f"last norm equal on {len(agreed)} processes: {agreed[0] == agreed[1]}; parameters finite: {finite}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
